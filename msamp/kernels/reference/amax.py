"""Largest magnitude of a tensor."""

import torch

from msamp.numerics.granularity import TENSORWISE


def amax(x: torch.Tensor) -> torch.Tensor:
    """FP32 0-dim amax of `x` (FP32, BF16 or FP16); +inf where it holds a NaN or an infinity."""
    return TENSORWISE.amax(x)
