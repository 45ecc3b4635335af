"""How an optimizer state begins: the seam of every state format. The update loads and stores it (`msamp.kernels.reference`)."""

from typing import Protocol

import torch

from msamp.numerics.formats import Format


class StateFormat(Protocol):
    """The seam."""

    format: Format

    def init(self, like: torch.Tensor) -> torch.Tensor:
        """A state of zeros in the shape and on the device of `like`."""

    def beside(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """What else such a state takes, as it begins, by what follows the state's name in its key."""


class PlainFormat:
    """FP32 or BF16: a torch tensor without a scale."""

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def init(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=self.format.dtype, device=like.device)

    def beside(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}
