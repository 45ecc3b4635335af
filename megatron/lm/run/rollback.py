"""Roll a run back to its newest healthy checkpoint.

A rollback restores everything except the position in the data, so that after a loss spike the run continues with other data.
"""

from dataclasses import replace

from megatron.lm import checkpoint
from megatron.lm.errors import RunStopped
from megatron.lm.training.state import Training

MAX_ROLLBACKS = 3  # to the same checkpoint


class Rollback:
    """Rollback to the newest healthy checkpoint of this run in `--save`.

    Attributes:
        iteration: of that checkpoint; None before there is one.
        count: number of rollbacks to it.
    """

    def __init__(self) -> None:
        self.iteration: int | None = None
        self.count = 0

    def saved(self, iteration: int) -> None:
        """Record a newer healthy checkpoint."""
        self.iteration, self.count = iteration, 0

    def go(self, training: Training) -> str:
        """Restore everything except the position in the data, and return a line for the log. Collective.

        Samples read since the checkpoint are not read again: `training.passed_over` counts them.

        Raises:
            RunStopped: after MAX_ROLLBACKS rollbacks to the same checkpoint.
            ValueError: if it cannot be read.
        """
        config, was, position = training.config, training.iteration, training.consumed_samples + training.passed_over
        folder = config.checkpoint.save
        assert folder is not None
        if self.iteration is None:
            return f"{folder} has no checkpoint of this run so far, so there is no rollback: training continues"
        if self.count == MAX_ROLLBACKS:
            raise RunStopped(
                f"the loss spiked again after {MAX_ROLLBACKS} rollbacks to iteration {self.iteration} in {folder}, each time with other "
                "data. Nothing was saved since. Resume from an older checkpoint with a lower --lr, or raise --loss-spike-threshold"
            )
        whole = replace(config.checkpoint, finetune=False, no_load_optim=False, no_load_rng=False)
        source = replace(whole, load=folder, ckpt_step=None, load_unhealthy=False, non_persistent_save_interval=None)
        training.config = replace(config, checkpoint=source)
        try:
            checkpoint.load(training)
        finally:
            training.config = config
        self.count += 1
        training.passed_over = position - training.consumed_samples
        return (
            f"rolled back from iteration {was} to iteration {training.iteration} ({self.count} of {MAX_ROLLBACKS} times to {folder}); the "
            f"{was - training.iteration} batches since then are skipped"
        )
