"""Losses that leave the mean of those before by too much."""

import math
from collections import deque


class LossSpikes:
    """Tells a loss that is more than `threshold` times the mean of the last `window` ones; nothing before there are so many."""

    def __init__(self, threshold: float, window: int) -> None:
        self.threshold = threshold
        self._losses: deque[float] = deque(maxlen=window)

    def mean_before(self, loss: float) -> float | None:
        """The mean that this loss (nats a token) leaves behind by too much; None where it does not. It counts from now on."""
        losses = self._losses
        mean = math.fsum(losses) / len(losses) if len(losses) == losses.maxlen else None
        losses.append(loss)
        return mean if self.threshold and mean is not None and loss > self.threshold * mean else None

    def forget(self) -> None:
        """The last loss does not count: its step is undone."""
        self._losses.pop()
