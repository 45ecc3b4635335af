"""Health of a checkpoint: the definition, and the state that a run keeps for it from step to step.

A diverged run writes checkpoints with valid digests that are worth nothing. `--keep-last` would delete the good ones before them, and a
resume would continue from a bad one. So every checkpoint records whether it is healthy. It is unhealthy if

1. a load would refuse it: it contains NaN, a negative mean of squares, an impossible scale or step count (`checkpoint.judging`);
2. the last step was skipped, other than in the search for a loss scale. In that search, a step overflows under FP16's dynamic loss scale
   although its loss is finite, and a smaller scale fixes it. No scale fixes a non-finite loss;
3. no token counted in the last step;
4. the last step's loss was more than `FACTOR` times the running mean of earlier losses. The mean covers about the last `WINDOW` healthy
   losses, so that a run that stays at a high loss after diverging does not become healthy again. A mean below `LEAST` nats counts as
   `LEAST`, since a loss near 0 doubles by chance. Checkpoints save the mean.

A loss belongs to the weights before the step, so the step that ruins them looks healthy itself. If all of the `DOUBTED` steps right after
a checkpoint have a problem, the checkpoint is marked unhealthy.

An unhealthy checkpoint is written with the reason. The marker stays at the newest healthy checkpoint, which `--keep-last` never deletes.
Loading skips unhealthy ones, unless `--ckpt-step` names one and `--load-unhealthy` is set.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FACTOR = 2.0
WINDOW = 100
LEAST = 1.0  # nats
DOUBTED = 2  # one bad batch is no proof
NAMED = 3  # problems that a message names at most


@dataclass
class Health:
    """The health of a run after its last step.

    Attributes:
        mean_loss: running mean of the healthy losses, nats per token; None before the first.
        losses: number of losses in it, up to WINDOW.
        problem: why a checkpoint written now is unhealthy whatever its tensors contain, or None.
        failed: number of consecutive steps with a problem, up to this one.
        since: the iteration of the first of them; 0 if there is none.
    """

    mean_loss: float | None = None
    losses: int = 0
    problem: str | None = None
    failed: int = 0
    since: int = 0

    def stepped(self, iteration: int, loss: float) -> None:
        """Record a step with this loss, in nats per token."""
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
        """Record a skipped step; `searches_scale`: a smaller loss scale may fix it."""
        self.problem = None if searches_scale else f"iteration {iteration} was skipped: its loss or gradient was non-finite"
        self._count(iteration)

    def empty(self, iteration: int) -> None:
        """Record a step in which no token counted: it has no loss."""
        self.problem = f"iteration {iteration} has no token that counts in the loss"
        self._count(iteration)

    def _count(self, iteration: int) -> None:
        if self.problem is None:
            self.failed = self.since = 0
        else:
            self.failed += 1
            self.since = self.since or iteration

    def against(self, saved: int) -> str | None:
        """Return why the steps since show that the checkpoint of iteration `saved` is unhealthy, or None."""
        shown = self.failed >= DOUBTED and self.since == saved + 1
        return f"all steps after it failed: {self.problem}" if shown else None

    def entry(self, problems: Sequence[str]) -> dict[str, Any]:
        """Return the entry for `checkpoint.json`; `problems`: why no load would accept the checkpoint."""
        more = [f"and {len(problems) - NAMED} more"] if len(problems) > NAMED else []
        problem = "; ".join([*problems[:NAMED], *more]) if problems else self.problem
        return {"problem": problem, "mean_loss": self.mean_loss, "losses": self.losses}


def of(info: Mapping[str, Any]) -> Health:
    """Return the health with which a run resumes, from `checkpoint.json`; a new one after an unhealthy checkpoint."""
    entry = info.get("health", {})
    if entry.get("problem") is not None:
        return Health()
    return Health(entry.get("mean_loss"), entry.get("losses", 0))


def problem_of(info: Mapping[str, Any]) -> str | None:
    """Return why a checkpoint is unhealthy, from its `checkpoint.json`; None for a healthy one, and if it has no entry."""
    problem: str | None = info.get("health", {}).get("problem")
    return problem
