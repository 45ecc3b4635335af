"""Cast with a given scale."""

import torch

from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import quantize


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast `x` to FP8 with `scale`, or round the product to BF16.

    It takes one read and one write. `torch.mul` with an output of another dtype runs at a third of a copy's speed (H200).

    Args:
        x: [M, N] FP32, BF16 or FP16.
        scale: FP32, 0-dim.
        dtype: an FP8 dtype, or BF16, which does not saturate.

    Returns:
        [M, N] payload of `dtype`, row-major.
    """
    return quantize(x, scale, of_dtype(dtype)).contiguous()
