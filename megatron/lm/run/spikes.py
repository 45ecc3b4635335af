"""Detection of loss spikes."""

import math
from collections import deque


class LossSpikes:
    """Detects a loss of more than `threshold` times the mean of the last `window` losses, once there are that many."""

    def __init__(self, threshold: float, window: int) -> None:
        self.threshold = threshold
        self._losses: deque[float] = deque(maxlen=window)

    def mean_before(self, loss: float) -> float | None:
        """Return the mean before this loss (nats per token) if it is a spike, else None; the loss then counts for the mean."""
        losses = self._losses
        mean = math.fsum(losses) / len(losses) if len(losses) == losses.maxlen else None
        losses.append(loss)
        return mean if self.threshold and mean is not None and loss > self.threshold * mean else None

    def forget(self) -> None:
        """Drop the last loss, because its step is undone."""
        self._losses.pop()
