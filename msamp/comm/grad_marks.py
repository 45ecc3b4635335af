"""A mark in `p.grad` while the gradient is kept elsewhere. It reveals a `zero_grad` that this library does not see.

`module.zero_grad()` and `p.grad = None` leave no trace where `p.grad` is None already. So a parameter with micro-batches that add up
elsewhere has a mark there: NaN in its shape, in the memory of one element. A mark that has gone or was zeroed says that the sum is to be
dropped. It is NaN, so that code which reads it as a gradient notices.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class _Mark(NamedTuple):
    held: Tensor
    version: int


class GradMarks:
    """The marks of some parameters, which are keys by identity."""

    def __init__(self) -> None:
        self._marks: dict[Tensor, _Mark] = {}

    def put(self, p: Tensor) -> None:
        """Leave a mark in `p.grad`, which has to be None."""
        mark = torch.full((), float("nan"), dtype=p.dtype, device=p.device).expand(p.shape)
        p.grad = mark
        self._marks[p] = _Mark(p.grad, p.grad._version)

    def lift(self, p: Tensor) -> bool:
        """Take the mark of `p` away, so that `p.grad` is None or what other code has put there.

        Returns:
            Whether the mark had gone or had been zeroed; False where there was none.
        """
        mark = self._marks.pop(p, None)
        if mark is None:
            return False
        if p.grad is not mark.held:
            return True
        p.grad = None
        # Only a mark that was written to is asked for its value, which waits for the device.
        return mark.held._version != mark.version and mark.held.numel() > 0 and not bool(mark.held.flatten()[0].isnan())

    def holds(self, p: Tensor) -> bool:
        """Whether `p.grad` is the mark of `p`."""
        return p in self._marks and p.grad is self._marks[p].held

    def clear(self) -> None:
        """Remove all marks."""
        for p in list(self._marks):
            self.lift(p)
