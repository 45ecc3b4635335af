"""Scaled cast."""

import torch

from msamp.kernels.reference.amax import amax
from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import quantize


def cast(x: torch.Tensor, scale: torch.Tensor, amax_slot: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Quantise `x` with `scale` and raise `amax_slot` to the amax of `x` in the same pass.

    Args:
        x: [M, N] FP32, BF16 or FP16.
        scale: FP32, 0-dim.
        amax_slot: FP32, 0-dim, changed in place; None takes no amax.
        dtype: an FP8 dtype.

    Returns:
        [M, N] payload of `dtype`, row-major.
    """
    if amax_slot is not None:
        amax_slot.copy_(torch.maximum(amax_slot, amax(x)))
    return quantize(x, scale, of_dtype(dtype)).contiguous()
