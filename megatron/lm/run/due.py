"""What follows a training step, by the intervals of the flags."""

from typing import NamedTuple

from megatron.lm.config import Config


class Due(NamedTuple):
    """What is due after the step of an iteration.

    Attributes:
        iteration: its number, from 1.
        last: nothing of what follows, but the end of training.
        evaluation: an evaluation (`--eval-interval`).
        save: a checkpoint (`--save-interval`).
        save_non_persistent: one that the next one replaces (`--non-persistent-save-interval`), where no other is due.
        leave: the run stops (`--exit-interval`).
        comparison: data-parallel copies of the weights are compared (`--check-weight-hash-across-dp-replicas-interval`).
    """

    iteration: int
    last: bool
    evaluation: bool
    save: bool
    save_non_persistent: bool
    leave: bool
    comparison: bool

    @classmethod
    def after(cls, iteration: int, config: Config, iterations: int) -> "Due":
        """What is due after the step of `iteration`; `iterations`: of the whole run (`Config.iterations`)."""
        training = config.training
        intervals = (
            training.eval_interval,
            config.checkpoint.save_interval,
            config.checkpoint.non_persistent_save_interval,
            training.exit_interval,
            training.check_weight_hash_across_dp_replicas_interval,
        )
        evaluation, save, passing, leave, comparison = (interval is not None and iteration % interval == 0 for interval in intervals)
        return cls(iteration, iteration == iterations, evaluation, save, passing and not save, leave, comparison)

    @property
    def verdict(self) -> bool:
        """Whether the step must be judged now and not when the next one has been launched: its result is about to be used."""
        return self.last or self.evaluation or self.save or self.save_non_persistent or self.leave
