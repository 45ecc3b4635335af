"""A run's own checkpoints: whether it begins without one, and the way back to the newest.

A rollback brings everything but the data back, so that a run that met a spike goes on over other data.
"""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron.lm import checkpoint
from megatron.lm.config import Config
from megatron.lm.run import RunStopped
from megatron.lm.training import Training

MAX_ROLLBACKS = 3  # to one checkpoint


class Rollback:
    """The way back to the newest checkpoint that this run has in `--save`.

    Attributes:
        iteration: of that checkpoint; None before there is one.
        count: times that the run went back to it.
    """

    def __init__(self) -> None:
        self.iteration: int | None = None
        self.count = 0

    def saved(self, iteration: int) -> None:
        """There is a newer one."""
        self.iteration, self.count = iteration, 0

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
        source = replace(config.checkpoint, load=folder, finetune=False, no_load_optim=False, no_load_rng=False, ckpt_step=None)
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


def begins_afresh(config: Config) -> bool:
    """Whether `--load` is the folder of `--save` and holds no checkpoint: the first start of a run that resumes by itself.

    Every rank must see the same folder; collective where there are several.

    Raises:
        ValueError: on every rank, where some see a checkpoint there and others do not.
    """
    if not config.checkpoint.resumes_itself:
        return False
    assert config.checkpoint.load is not None
    answers = [not checkpoint.exists(Path(config.checkpoint.load))]
    if dist.is_initialized():
        answers = [True] * dist.get_world_size()
        dist.all_gather_object(answers, not checkpoint.exists(Path(config.checkpoint.load)))
    if len(set(answers)) > 1:
        raise ValueError(
            f"rank {answers.index(False)} sees a checkpoint in --load {config.checkpoint.load}, rank {answers.index(True)} does not: "
            "name a folder that all machines share"
        )
    return answers[0]
