"""Scaled optimizer states: E4M3, E5M2 or FP16 payload with one scale a tensor (FP8-LM section 2.2)."""

import torch

from msamp.numerics.formats import Format
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.state_coat import CoatFormat
from msamp.optim.state_format import PlainFormat, StateFormat


class ScaledFormat:
    """ScalingTensors whose scales follow from the bounds of what is stored."""

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def init(self, like: torch.Tensor) -> torch.Tensor:
        payload = torch.zeros(like.shape, dtype=self.format.dtype, device=like.device)
        return ScalingTensor(payload, torch.ones((), device=like.device), torch.float32)

    def beside(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}


def state_format(fmt: Format) -> StateFormat:
    """The way to store a state in `fmt`."""
    if fmt.group:
        return CoatFormat(fmt)
    return ScaledFormat(fmt) if fmt.scaled else PlainFormat(fmt)
