"""Actions that are due after a training step, from the intervals in the flags."""

from typing import NamedTuple

from megatron.lm.config import CheckpointConfig, TrainingConfig


class Due(NamedTuple):
    """Actions that are due after the step of an iteration.

    Attributes:
        iteration: its number, from 1.
        last: the end of training; then none of the following is due.
        evaluation: an evaluation (`--eval-interval`).
        save: a checkpoint (`--save-interval`).
        save_non_persistent: a non-persistent checkpoint (`--non-persistent-save-interval`), if no other is due.
        leave: stop the run (`--exit-interval`).
        comparison: compare data-parallel copies of the weights (`--check-weight-hash-across-dp-replicas-interval`).
    """

    iteration: int
    last: bool
    evaluation: bool
    save: bool
    save_non_persistent: bool
    leave: bool
    comparison: bool

    @classmethod
    def after(cls, iteration: int, iterations: int, training: TrainingConfig, checkpoint: CheckpointConfig) -> "Due":
        """Return what is due after the step of `iteration`; `iterations`: of the whole run (`Config.iterations`)."""
        intervals = (
            training.eval_interval,
            checkpoint.save_interval,
            checkpoint.non_persistent_save_interval,
            training.exit_interval,
            training.check_weight_hash_across_dp_replicas_interval,
        )
        evaluation, save, passing, leave, comparison = (interval is not None and iteration % interval == 0 for interval in intervals)
        return cls(iteration, iteration == iterations, evaluation, save, passing and not save, leave, comparison)

    @property
    def verdict(self) -> bool:
        """Return whether the step must be checked now, because its result is about to be used, instead of after the next launch."""
        return self.last or self.evaluation or self.save or self.save_non_persistent or self.leave
