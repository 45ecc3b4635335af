"""How an optimizer state is stored: the seam of every state format.

A format makes a state (`init`), gives FP32 values (`load`) and takes new ones in place (`store_`). A scaled format needs
its scale before the values are known (a fused kernel writes in one pass), so `store_` gets bounds: numbers that no
magnitude exceeds. `load` and `store_` work on lists, so that small tensors share launches.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from msamp.kernels.reference.adamw import load, store_
from msamp.numerics.formats import Format


class StateFormat(Protocol):
    """The seam."""

    format: Format

    def init(self, like: torch.Tensor) -> torch.Tensor:
        """A state of zeros in the shape and on the device of `like`."""

    def load(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """FP32 values; a state that is FP32 itself is returned as it is, not copied."""

    def store_(self, states: Sequence[torch.Tensor], values: Sequence[torch.Tensor], bounds: torch.Tensor | None) -> None:
        """Overwrite the states with FP32 `values`.

        Args:
            bounds: FP32 [len(states)], each at least the amax of its values; None for formats without a scale.
        """


class PlainFormat:
    """FP32 or BF16: a torch tensor without a scale."""

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def init(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=self.format.dtype, device=like.device)

    def load(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return load(states)

    def store_(self, states: Sequence[torch.Tensor], values: Sequence[torch.Tensor], bounds: torch.Tensor | None) -> None:
        store_(states, values, bounds)
