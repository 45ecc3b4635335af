"""Start of a run: from scratch, resumed, or as a child of another run. The same command starts and restarts a job.

--save S               start from scratch; S must not contain checkpoints, which would be overwritten
--load S --save S      resume from S, or start from scratch if S has no checkpoint
--load A --save B      resume from B if it has a child of the run in A; start such a child if B has no checkpoint
--load A               start a child that is not saved
"""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron.lm import checkpoint
from megatron.lm.checkpoint.files import non_persistent
from megatron.lm.checkpoint.files.folder import refuse_other_run
from megatron.lm.config import CheckpointConfig
from megatron.lm.config.from_checkpoint import Saved
from megatron.lm.processes.agreement import rank_0_decides
from megatron.lm.training.run_record import Run, run_name, run_of


def with_checkpoint(asked: CheckpointConfig) -> tuple[CheckpointConfig, str | None]:
    """Return the settings with the checkpoint to load, and a line for the log. Rank 0 decides. Collective with several ranks.

    Raises:
        ValueError: on every rank, if `--save` contains another run, `--ckpt-step` does not exist, or some ranks see a checkpoint that
            others do not.
    """
    settings, line = rank_0_decides(lambda: _checkpoint_settings(asked))
    if dist.is_initialized() and asked.load is not None:
        folder, answers = settings.load or asked.load, [True] * dist.get_world_size()
        dist.all_gather_object(answers, non_persistent.any_in(settings, Path(folder)))
        if len(set(answers)) > 1:
            raise ValueError(
                f"rank {answers.index(True)} sees a checkpoint in --load {folder}, rank {answers.index(False)} does not: "
                "use a folder that all machines share"
            )
    return settings, line


def _checkpoint_settings(settings: CheckpointConfig) -> tuple[CheckpointConfig, str | None]:
    """Return the checkpoint settings on rank 0, and a line for the log."""
    load, save = settings.load, settings.save
    if load is not None and settings.resumes_itself:
        if non_persistent.any_in(settings, Path(load)):
            return settings, None
        if settings.exit_on_missing_checkpoint:
            raise ValueError(
                f"--load {load} holds no checkpoint: choose a folder with one, or drop --exit-on-missing-checkpoint to start from scratch"
            )
        if settings.ckpt_step is not None:
            raise ValueError(
                f"--ckpt-step {settings.ckpt_step}: --load {load} holds no checkpoint; choose its folder, or drop --ckpt-step to start "
                "from scratch"
            )
        line = f"warning: --load {load} holds no checkpoint, and is the folder of --save: training starts from scratch"
        return replace(settings, load=None, no_load_optim=False, no_load_rng=False), line
    if save is None or not non_persistent.any_in(settings, Path(save)):
        return settings, None
    if load is not None and _is_the_child(settings, Path(load), Path(save)):
        there = replace(settings, load=save, finetune=False, no_load_optim=False, no_load_rng=False, ckpt_step=None, load_unhealthy=False)
        return there, f"--save {save} contains this run, which started from --load {load}: it resumes there"
    for folder in (Path(save), non_persistent.folder_of(settings, save)):
        if folder is not None:
            refuse_other_run(folder, Run())
    return settings, None


def saved_settings(asked: CheckpointConfig) -> Saved | None:
    """Return the settings in the checkpoint that a start with these flags loads; None if it starts from initial weights.

    Raises:
        ValueError: as `with_checkpoint`, and if the checkpoint cannot be read.
    """
    settings, _ = _checkpoint_settings(asked)
    if settings.load is None or not non_persistent.any_in(settings, Path(settings.load)):
        return None
    return checkpoint.saved_settings(settings)


def _is_the_child(settings: CheckpointConfig, load: Path, save: Path) -> bool:
    """Return whether the run in `save` started from the one in `load` with these settings."""
    info, parent = non_persistent.owner_of(settings, save), non_persistent.owner_of(settings, load)
    saved_run = run_of(info) if info is not None else None
    if saved_run is None or saved_run.parent is None or parent is None:
        return False
    return (
        saved_run.parent.run == run_name(parent)
        and saved_run.parent.finetune == settings.finetune
        and settings.ckpt_step in (None, saved_run.parent.iteration)
    )
