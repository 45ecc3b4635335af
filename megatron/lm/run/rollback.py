"""The way back to the newest healthy checkpoint of a run.

A rollback brings everything but the data back, so that a run that met a spike goes on over other data.
"""

from dataclasses import replace

from megatron.lm import checkpoint
from megatron.lm.errors import RunStopped
from megatron.lm.training.state import Training

MAX_ROLLBACKS = 3  # to one checkpoint


class Rollback:
    """The way back to the newest healthy checkpoint that this run has in `--save`.

    Attributes:
        iteration: of that checkpoint; None before there is one.
        count: times that the run went back to it.
    """

    def __init__(self) -> None:
        self._healthy: list[int] = []
        self.count = 0

    @property
    def iteration(self) -> int | None:
        return self._healthy[-1] if self._healthy else None

    def saved(self, iteration: int) -> None:
        """There is a newer one."""
        self._healthy.append(iteration)
        self.count = 0

    def forget(self) -> None:
        """The newest one is not healthy after all."""
        self._healthy.pop()
        self.count = 0

    def go(self, training: Training) -> str:
        """Bring everything but the data back to where it was; a line for the log. Collective.

        What was read since the checkpoint is not read again: `training.passed_over` grows by it.

        Raises:
            RunStopped: after MAX_ROLLBACKS times to the same checkpoint.
            ValueError: where it cannot be read.
        """
        config, was, position = training.config, training.iteration, training.consumed_samples + training.passed_over
        folder = config.checkpoint.save
        assert folder is not None
        if self.iteration is None:
            return f"{folder} holds no checkpoint of this run so far: nothing to roll back to, training goes on"
        if self.count == MAX_ROLLBACKS:
            raise RunStopped(
                f"the loss spiked again after {MAX_ROLLBACKS} rollbacks to iteration {self.iteration} in {folder}, each time over other "
                "data. Nothing was saved since. Go on from an older checkpoint, with a lower --lr, or raise --loss-spike-threshold"
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
            f"{was - training.iteration} batches since then are passed over"
        )
