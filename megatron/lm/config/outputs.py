"""What a run tells, writes and reads back: logs, checkpoints, and steps that go wrong."""

import os
from dataclasses import dataclass

from megatron.lm.config.schema import COUNT, COUNT_OR_ZERO, NON_NEGATIVE, POSITIVE, Interval, setting

LATEST_CHECKPOINT_FILE = "latest_checkpointed_iteration.txt"
SPIKE_ACTIONS = ("warn", "rollback")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run tells about itself."""

    log_interval: int = setting("iterations between log lines", 100, legal=COUNT)
    tensorboard_dir: str | None = setting("folder for TensorBoard's event files", None)
    metrics_file: str | None = setting("file to which every measurement is appended, one JSON object a line", None)
    peak_tflops: float | None = setting("peak of one device in TFLOP/s, for MFU; derived: 989 (BF16) on H100, H200", None, legal=POSITIVE)
    dry_run: bool = setting("print the grid, and parameters and bytes of a process, without training; refuse what does not fit", False)
    device_memory_gib: float | None = setting(
        "memory of one device, for --dry-run; derived: that of the GPU here, without one 80", None, legal=POSITIVE
    )
    record_precision: str | None = setting(
        "file to which the precision recorder appends what every tensor of a recorded step lost, one JSON object a step", None
    )
    record_interval: int = setting("iterations between the steps that --record-precision records", 500, legal=COUNT)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = setting("folder to save checkpoints in", None)
    load: str | None = setting("folder with the checkpoint to start from", None)
    save_interval: int | None = setting("iterations between checkpoints; derived: only one, at the end", None, legal=COUNT)
    async_save: bool = setting("write checkpoints in the background, from a copy in the host's memory, while training goes on", False)
    keep_last: int | None = setting("checkpoints to keep in --save, the newest; derived: all", None, legal=COUNT)
    emergency_save: str | None = setting("folder for a last checkpoint where --save cannot be written any more", None)
    ckpt_step: int | None = setting("iteration of the checkpoint to load; derived: the newest healthy one", None, legal=COUNT_OR_ZERO)
    load_unhealthy: bool = setting("load what --ckpt-step names even where it says that the run had diverged", False)
    finetune: bool = setting("load only the weights and start at iteration 0", False)
    no_load_optim: bool = setting("do not load the optimizer's state", False)
    no_load_rng: bool = setting("do not load the state of the random generators", False)

    @property
    def resumes_itself(self) -> bool:
        """Whether the run goes on from its own checkpoints: `--load` is the folder of `--save`, which is empty at its first start."""
        if self.load is None or self.save is None or self.finetune:
            return False
        return os.path.realpath(self.load) == os.path.realpath(self.save)


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """Steps that go wrong."""

    max_skipped_steps: int = setting("stop when so many steps in a row had a loss or gradient that was not finite", 20, legal=COUNT)
    loss_spike_threshold: float = setting(
        "a loss of more than this many times the mean of the last ones is a spike; 0: no loss is", 0.0, legal=NON_NEGATIVE
    )
    loss_spike_window: int = setting(
        "steps whose mean --loss-spike-threshold is about; no spike is seen before there are so many", 100, legal=Interval(1, 10**6)
    )
    loss_spike_action: str = setting(
        "at a spike: say so, or also go back to the newest checkpoint in --save and pass over the data since", "warn", choices=SPIKE_ACTIONS
    )
