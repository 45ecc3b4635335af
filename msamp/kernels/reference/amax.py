"""Largest magnitude of a tensor."""

import torch

from msamp.numerics.granularity import TENSORWISE


def amax(x: torch.Tensor) -> torch.Tensor:
    """Return the amax of `x` (FP32, BF16 or FP16), FP32 0-dim; +inf if `x` contains NaN or Inf."""
    return TENSORWISE.amax(x)
