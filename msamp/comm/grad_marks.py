"""Markers in `p.grad` while the gradient accumulates elsewhere, which detect a `zero_grad` that this library does not see.

`module.zero_grad()` and `p.grad = None` leave no trace if `p.grad` is already None. So a parameter whose micro-batches accumulate elsewhere
has a marker in `p.grad`: NaN in its shape, in the memory of one element. If the marker is gone or zeroed, the user cleared the gradient and
the sum must be dropped. It is NaN, so that code which reads it as a gradient notices.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class _Mark(NamedTuple):
    held: Tensor
    version: int


class GradMarks:
    """The markers of some parameters, keyed by identity."""

    def __init__(self) -> None:
        self._marks: dict[Tensor, _Mark] = {}

    def put(self, p: Tensor) -> None:
        """Put a marker in `p.grad`, which must be None."""
        mark = torch.full((), float("nan"), dtype=p.dtype, device=p.device).expand(p.shape)
        p.grad = mark
        self._marks[p] = _Mark(p.grad, p.grad._version)

    def lift(self, p: Tensor) -> bool:
        """Remove the marker of `p`, so that `p.grad` is None or what other code has put there.

        Returns:
            Whether the marker was gone or zeroed; False if there was none.
        """
        mark = self._marks.pop(p, None)
        if mark is None:
            return False
        if p.grad is not mark.held:
            return True
        p.grad = None
        # Reading the value waits for the device, so only a marker that was written to is read.
        return mark.held._version != mark.version and mark.held.numel() > 0 and not bool(mark.held.flatten()[0].isnan())

    def holds(self, p: Tensor) -> bool:
        """Return whether `p.grad` is the marker of `p`."""
        return p in self._marks and p.grad is self._marks[p].held

    def clear(self) -> None:
        """Remove all markers."""
        for p in list(self._marks):
            self.lift(p)
