"""Scaled optimizer states: E4M3, E5M2 or FP16 payload with one scale a tensor (FP8-LM section 2.2)."""

from collections.abc import Sequence

import torch

from msamp.kernels.reference.adamw import load, store_
from msamp.numerics.formats import Format
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.state_format import PlainFormat, StateFormat


class ScaledFormat:
    """ScalingTensors whose scales follow from the bounds of what is stored; a bound of zero keeps the last scale."""

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def init(self, like: torch.Tensor) -> torch.Tensor:
        payload = torch.zeros(like.shape, dtype=self.format.dtype, device=like.device)
        return ScalingTensor(payload, torch.ones((), device=like.device), torch.float32)

    def load(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return load(states)

    def store_(self, states: Sequence[torch.Tensor], values: Sequence[torch.Tensor], bounds: torch.Tensor | None) -> None:
        store_(states, values, bounds)


def state_format(fmt: Format) -> StateFormat:
    """The way to store a state in `fmt`."""
    return ScaledFormat(fmt) if fmt.scaled else PlainFormat(fmt)
