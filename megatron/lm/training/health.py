"""Whether a checkpoint is worth going on from: the definition, and what of it a run keeps from step to step.

A run that has diverged writes checkpoints as any other does: whole, with sound digests, and worth nothing. `--keep-last` would delete the
good ones before them, and a resume would go on from the dead. So each checkpoint says when it is saved whether it is healthy. It is not
where

1. a tensor of it holds NaN or infinity;
2. the last step was skipped, and not in search of a loss scale. Such a search is a step that overflowed under FP16's dynamic loss scale
   with a finite loss: a smaller scale cures it. No scale cures a loss that is not finite itself;
3. the last step's loss was more than `FACTOR` times the running mean of the losses before it. The mean is over about the last `WINDOW`
   healthy ones, so that a run that stays where it diverged to does not become healthy by habit; a mean below `LEAST` nats counts as that,
   since a loss near 0 doubles by chance. The mean goes on through checkpoints.

A loss is of the weights before the step, so that the step that ruins them looks well itself. Where the `DOUBTED` steps right after a
checkpoint all have a problem, it is the checkpoint's, which is marked unhealthy then.

An unhealthy checkpoint is written and says why. The marker stays at the newest healthy one, `--keep-last` never deletes that one, and
loading passes over the others, unless `--ckpt-step` names one and `--load-unhealthy` stands beside it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FACTOR = 2.0
WINDOW = 100
LEAST = 1.0  # nats
DOUBTED = 2  # one bad batch is no proof
NAMED = 3  # tensors that a message names
_BLOCK = 2**24  # elements that are looked at in FP32 at a time


@dataclass
class Health:
    """How the last step of a run went.

    Attributes:
        mean_loss: running mean of the healthy losses, nats a token; None before the first.
        losses: how many it has counted, up to WINDOW.
        problem: why a checkpoint of now is unhealthy whatever it holds; None where nothing speaks against it.
        failed: steps in a row, up to this one, that had a problem.
        since: the iteration of the first of them; 0 where there is none.
    """

    mean_loss: float | None = None
    losses: int = 0
    problem: str | None = None
    failed: int = 0
    since: int = 0

    def stepped(self, iteration: int, loss: float) -> None:
        """The step was done, with this loss in nats a token."""
        mean, self.problem = self.mean_loss, None
        if not math.isfinite(loss):
            self.problem = f"the loss of iteration {iteration} is {loss}"
        elif mean is not None and loss > FACTOR * max(mean, LEAST):
            self.problem = f"the loss of iteration {iteration}, {loss:.4g}, is more than {FACTOR:g} times the mean {mean:.4g} before it"
        else:
            self.losses = min(self.losses + 1, WINDOW)
            self.mean_loss = loss if mean is None else mean + (loss - mean) / self.losses
        self._count(iteration)

    def skipped(self, iteration: int, searches_scale: bool) -> None:
        """The step was skipped; `searches_scale`: a smaller loss scale may cure it."""
        self.problem = None if searches_scale else f"iteration {iteration} was skipped: its loss or gradient was not finite"
        self._count(iteration)

    def _count(self, iteration: int) -> None:
        if self.problem is None:
            self.failed = self.since = 0
        else:
            self.failed += 1
            self.since = self.since or iteration

    def against(self, saved: int) -> str | None:
        """Why the checkpoint of iteration `saved` is unhealthy after all, as the steps since show; None where they do not."""
        shown = self.failed >= DOUBTED and self.since == saved + 1
        return f"all steps from it on failed: {self.problem}" if shown else None

    def entry(self, spoiled: Sequence[str]) -> dict[str, Any]:
        """For `checkpoint.json`; `spoiled`: names of tensors in the checkpoint that are not finite."""
        more = f" and {len(spoiled) - NAMED} more" if len(spoiled) > NAMED else ""
        problem = f"{', '.join(spoiled[:NAMED])}{more} hold NaN or infinity" if spoiled else self.problem
        return {"problem": problem, "mean_loss": self.mean_loss, "losses": self.losses}


def of(info: Mapping[str, Any]) -> Health:
    """The health with which a run goes on from a checkpoint, from its `checkpoint.json`; a fresh one after an unhealthy checkpoint."""
    entry = info.get("health", {})
    if entry.get("problem") is not None:
        return Health()
    return Health(entry.get("mean_loss"), entry.get("losses", 0))


def problem_of(info: Mapping[str, Any]) -> str | None:
    """Why a checkpoint is unhealthy, from its `checkpoint.json`; None for a healthy one, and for those that do not say."""
    problem: str | None = info.get("health", {}).get("problem")
    return problem


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors, of any dtype and device, that hold NaN or infinity; waits for the device."""
    return [name for name, x in tensors if x.dtype.is_floating_point and not _is_finite(x)]


def _is_finite(x: Tensor) -> bool:
    return bool(torch.stack([block.float().isfinite().all() for block in x.reshape(-1).split(_BLOCK)]).all())
