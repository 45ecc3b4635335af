"""Rules for checkpoints, logs and fault handling."""

import os
import stat
from dataclasses import fields
from pathlib import Path

from megatron.lm.config.sections.outputs import LATEST_CHECKPOINT_FILE, CheckpointConfig, ProfilingConfig
from megatron.lm.config.sections.schema import flag
from megatron.lm.config.whole import Config, Problems, Rules


def loading(config: Config, world_size: int) -> Problems:
    """A checkpoint to load must exist, and flags for loading require one."""
    checkpoint = config.checkpoint
    if checkpoint.load_unhealthy and checkpoint.ckpt_step is None:
        yield "--load-unhealthy has no effect by itself: give the checkpoint with --ckpt-step N, or drop it"
    for name in ("use_mp_args_from_checkpoint_args", "no_use_tokenizer_model_from_checkpoint_args"):
        if getattr(checkpoint, name) and not checkpoint.use_checkpoint_args:
            yield f"{flag(name)} has no effect without --use-checkpoint-args: add it, or drop this"
    if checkpoint.override_opt_param_scheduler and checkpoint.use_checkpoint_opt_param_scheduler:
        yield "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other: give one of them"
    if checkpoint.load is None:
        for name in ("finetune", "no_load_optim", "no_load_rng", "exit_on_missing_checkpoint", "use_checkpoint_args"):
            if getattr(checkpoint, name):
                yield f"{flag(name)} has no effect without a checkpoint: add --load FOLDER, or drop it"
        if checkpoint.ckpt_step is not None:
            yield f"--ckpt-step {checkpoint.ckpt_step} has no effect without a checkpoint: add --load FOLDER, or drop it"
        return
    if checkpoint.resumes_itself:
        return  # its first start finds no checkpoint
    folder = Path(checkpoint.load)
    if not os.path.isdir(folder):  # unlike Path.is_dir, raises no exception if a parent folder is not accessible
        yield f"--load {folder} is not a folder: give one that a run with --save wrote, or drop --load to start from scratch"
    elif not any(_holds_checkpoints(Path(root)) for root in (folder, checkpoint.non_persistent_folder(str(folder))) if root is not None):
        yield (
            f"--load {folder} contains no checkpoint (and no {LATEST_CHECKPOINT_FILE}): give another, or drop --load to start from scratch"
        )


def _holds_checkpoints(folder: Path) -> bool:
    return os.path.isfile(folder / LATEST_CHECKPOINT_FILE) or any(folder.glob("iter_*"))


def saving(config: Config, world_size: int) -> Problems:
    """Flags for saving require a folder to save in, and the flags that they depend on."""
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        yield from _without_folder(checkpoint)
        return
    beside = checkpoint.non_persistent_folder(checkpoint.save)
    if beside is not None and os.path.realpath(beside) == os.path.realpath(checkpoint.save):
        yield f"--non-persistent-global-ckpt-dir {beside} is also the folder of --save: give another"
    if beside is None and checkpoint.non_persistent_global_ckpt_dir is not None:
        given = f"--non-persistent-global-ckpt-dir {checkpoint.non_persistent_global_ckpt_dir}"
        yield f"{given} has no effect without --non-persistent-save-interval: add it, or drop the folder"
    if checkpoint.no_save_optim and config.faults.loss_spike_threshold and config.faults.loss_spike_action == "rollback":
        yield "--loss-spike-action rollback goes back to a checkpoint with the optimizer's state: drop --no-save-optim, or choose warn"


def _without_folder(checkpoint: CheckpointConfig) -> Problems:
    for name in ("save_interval", "keep_last", "non_persistent_save_interval"):
        value = getattr(checkpoint, name)
        if value is not None:
            yield f"{flag(name)} {value} has no effect without a folder: add --save FOLDER, or drop it"
    if (folder := checkpoint.non_persistent_global_ckpt_dir) is not None:
        yield f"--non-persistent-global-ckpt-dir {folder} has no effect without --save: add --save FOLDER, or drop it"
    for name in ("async_save", "no_save_optim", "no_save_rng"):
        if getattr(checkpoint, name):
            yield f"{flag(name)} has no effect without a folder: add --save FOLDER, or drop it"


def faults(config: Config, world_size: int) -> Problems:
    """The threshold of a spike must be above 1, and a rollback needs a checkpoint to go back to."""
    settings, checkpoint = config.faults, config.checkpoint
    if 0 < settings.loss_spike_threshold <= 1:
        yield (
            f"--loss-spike-threshold {settings.loss_spike_threshold:g} makes every loss a spike: give more than 1, such as 2, or 0 for none"
        )
    if not settings.loss_spike_threshold:
        for setting in (f for f in fields(settings) if f.name in ("loss_spike_window", "loss_spike_action")):
            value = getattr(settings, setting.name)
            if value != setting.default:
                yield f"{flag(setting.name)} {value} has no effect without --loss-spike-threshold: add it, or drop this"
    elif settings.loss_spike_action == "rollback" and None in (checkpoint.save, checkpoint.save_interval):
        yield "--loss-spike-action rollback goes back to checkpoints of this run: add --save FOLDER and --save-interval N, or choose warn"


def outputs(config: Config, world_size: int) -> Problems:
    """Every output must be writable, and flags of a dry run require one."""
    if config.logging.device_memory_gib is not None and not config.logging.dry_run:
        yield f"--device-memory-gib {config.logging.device_memory_gib:g} has no effect without --dry-run: add it, or drop the memory"
    folders = {
        "save": config.checkpoint.save,
        "non_persistent_global_ckpt_dir": config.checkpoint.non_persistent_global_ckpt_dir,
        "tensorboard_dir": config.logging.tensorboard_dir,
        "wandb_save_dir": config.logging.wandb_save_dir,
        "data_cache_path": config.data.data_cache_path,
    }
    for name, folder in folders.items():
        if folder is not None:
            yield from _writable(f"{flag(name)} {folder}", Path(folder))
    files = {
        "metrics_file": config.logging.metrics_file,
        "record_precision": config.logging.record_precision,
        "fp8_gain_cache": config.precision.fp8_gain_cache,
        "memory_snapshot_path": config.profiling.memory_snapshot_path if config.profiling.record_memory_history else None,
    }
    for name, path in files.items():
        if path is not None:
            yield from _writable_file(name, Path(path))


def _writable_file(name: str, file: Path) -> Problems:
    """Yield a problem unless `file`, the value of a flag, can be written or created."""
    if os.path.isdir(file):
        yield f"{flag(name)} {file} is a folder: give a file in it"
    elif os.path.exists(file) and not _takes_lines(file, name):
        yield f"{flag(name)} {file} is not a regular file: give one"
    elif os.path.exists(file) and not os.access(file, os.W_OK):
        yield f"{flag(name)} {file} cannot be written: change its permissions, or choose another path"
    else:
        yield from _writable(f"{flag(name)} {file}", file.parent)


def _takes_lines(file: Path, name: str) -> bool:
    """Return whether lines can be appended. A cache must be a regular file, since a device cannot be read back; a pipe would wait for its
    reader."""
    return os.path.isfile(file) or (name != "fp8_gain_cache" and stat.S_ISCHR(os.stat(file).st_mode))


def _writable(what: str, folder: Path) -> Problems:
    """Yield a problem unless `folder` is writable or can be created in its nearest existing parent."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(nearest):
        yield f"{what}: {nearest} is a file, not a folder; choose another path"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{what}: no permission to write in {nearest}; choose another path, or change its permissions"


def weights_and_biases(config: Config, world_size: int) -> Problems:
    """A run of Weights & Biases has a project, a name and a folder."""
    logging = config.logging
    if logging.wandb_project is None:
        for name in ("wandb_exp_name", "wandb_save_dir", "wandb_entity"):
            if getattr(logging, name) is not None:
                yield f"{flag(name)} {getattr(logging, name)} has no effect without a project: add --wandb-project TEXT, or drop it"
        return
    if logging.wandb_exp_name is None:
        yield f"--wandb-project {logging.wandb_project} needs a name for the run: add --wandb-exp-name TEXT"
    if logging.wandb_save_dir is None and config.checkpoint.save is None:
        yield f"--wandb-project {logging.wandb_project} needs a folder for its files: add --wandb-save-dir FOLDER or --save FOLDER"


def profiles(config: Config, world_size: int) -> Problems:
    """A profile has iterations, ranks and a folder."""
    settings = config.profiling
    start, end, ranks = settings.profile_step_start, settings.profile_step_end, settings.profile_ranks
    if not settings.profile:
        for name in ("use_pytorch_profiler", "profile_step_start", "profile_step_end", "profile_ranks"):
            if getattr(settings, name) != getattr(ProfilingConfig, name):
                yield f"{flag(name)} has no effect without --profile: add it, or drop this"
        return
    if start >= end:
        yield f"--profile-step-start {start} is not below --profile-step-end {end}: the iterations {start + 1} to {end} are profiled"
    if not ranks or max(ranks) >= world_size:
        given = " ".join(map(str, ranks)) or "without a value"
        yield f"--profile-ranks {given}: give ranks in [0, {world_size - 1}], since there are {world_size} processes"
    if settings.use_pytorch_profiler and config.logging.tensorboard_dir is None:
        yield "--use-pytorch-profiler needs a folder for its trace: add --tensorboard-dir FOLDER"


RULES: Rules = {
    loading: ("checkpoint",),
    saving: ("checkpoint", "faults"),
    faults: ("faults", "checkpoint"),
    profiles: ("profiling", "logging"),
    weights_and_biases: ("logging", "checkpoint"),
    outputs: ("checkpoint", "logging", "data", "precision", "profiling"),
}
