"""Weights & Biases: the curves of TensorBoard in a run of W&B, with `--wandb-project`.

As in Megatron-LM, the last rank logs. The run of W&B has the ID that checkpoints record (`megatron.lm.training.run_record`), so a job that
resumes from its own checkpoint continues the same run. WANDB_MODE, WANDB_API_KEY and the other variables of wandb have wandb's meaning;
WANDB_RUN_ID replaces the ID.

W&B orders points by a step that must not decrease. The step is the iteration until a rollback or a resume repeats iterations: from then on
steps are larger than iterations, and no point is lost. Every point also has `iteration`, which is the x-axis of all curves.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from megatron.lm.config import LoggingConfig
from megatron.lm.shell.logs import Unwritten

ITERATION = "iteration"
FINISH_SECONDS = 600.0  # for uploads at the end, unless WANDB_FINISH_TIMEOUT is set; wandb's default waits forever


def logs_here(logging: LoggingConfig) -> bool:
    """Return whether this rank logs to Weights & Biases."""
    return logging.wandb_project is not None and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def check_installed(logging: LoggingConfig) -> None:
    """Raise a ValueError on the rank that logs if the package is missing.

    A folder `wandb` in the working directory, as the package writes it, is imported in its place as an empty package.
    """
    if not logs_here(logging):
        return
    try:
        import wandb

        _ = wandb.init
    except (ImportError, AttributeError) as error:
        project = logging.wandb_project
        raise ValueError(f"--wandb-project {project} needs the package wandb ({error}): pip install -e '.[wandb]'") from None


class WandbRun:
    """A run of Weights & Biases.

    Args:
        logging: its `--wandb-*` flags name the run.
        folder: in which wandb writes.
        flags: of the run by name, which become the configuration of the run of W&B.
        run_id: identity of the training run; a run of W&B with this ID is continued.
        unwritten: counts failed writes.

    Raises:
        ValueError: if wandb cannot start, for example without an API key.
    """

    def __init__(self, logging: LoggingConfig, folder: str, flags: Mapping[str, Any], run_id: str, unwritten: Unwritten) -> None:
        import wandb

        self._error, self._unwritten = wandb.Error, unwritten
        self._where = f"--wandb-project {logging.wandb_project}"
        os.makedirs(folder, exist_ok=True)
        options: dict[str, Any] = {"console": "off", "quiet": True}  # `print` stays ours; quiet: no summary of all curves at the end
        if "WANDB_FINISH_TIMEOUT" not in os.environ:
            options["finish_timeout"] = FINISH_SECONDS
        run: dict[str, Any] = {} if "WANDB_RUN_ID" in os.environ else {"id": run_id}
        if "WANDB_RESUME" not in os.environ:
            run["resume"] = "allow"
        try:
            self._run = wandb.init(
                project=logging.wandb_project,
                name=logging.wandb_exp_name,
                entity=logging.wandb_entity,
                dir=folder,
                config=dict(flags),
                allow_val_change=True,  # a resume may have other flags
                settings=wandb.Settings(**options),
                **run,
            )
            self._run.define_metric(ITERATION)
            self._run.define_metric("*", step_metric=ITERATION)
            self._last = self._run.step - 1
        except Exception as error:  # wandb's own, pydantic's and its service's: the other ranks are waiting
            raise ValueError(
                f"{self._where}: Weights & Biases cannot start ({error}): run `wandb login` or set WANDB_API_KEY, or set WANDB_MODE=offline"
            ) from error
        self._ahead = 0

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Add one point to each of some curves; a failure is only counted."""
        if iteration + self._ahead < self._last:
            self._ahead = self._last + 1 - iteration
        self._last = iteration + self._ahead
        with self._unwritten.endured(self._where):
            try:
                self._run.log({ITERATION: iteration, **values}, step=self._last)
            except self._error as error:
                raise OSError(str(error)) from error

    def close(self, *, failed: bool = False) -> None:
        """Upload what is left and mark the run as finished, or as failed."""
        with self._unwritten.endured(self._where):
            try:
                self._run.finish(exit_code=int(failed))
            except self._error as error:
                raise OSError(str(error)) from error
