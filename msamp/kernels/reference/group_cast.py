"""Cast with one power-of-two scale per small group of a row, and its inverse: COAT's format for saved inputs of non-linear layers."""

import torch

from msamp.numerics.formats import of_dtype
from msamp.numerics.granularity import Group
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import inverse, scale_from_amax

NOT_FINITE = 255  # as in the E8M0 format of the OCP microscaling specification


def check_group_cast(x: torch.Tensor, size: int) -> None:
    """Raise a ValueError unless `x` is a matrix and `size` is supported."""
    if x.ndim != 2:
        raise ValueError(f"x is {tuple(x.shape)}; a cast with groups requires [M, N]: flatten the tokens into M")
    if size < 1 or size & (size - 1):
        raise ValueError(f"a group of {size} elements has no kernel; use a power of two, such as COAT's 16")


def group_cast(x: torch.Tensor, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast `x` with a just-in-time scale per `size` elements of a row (COAT: mixed granularity, 1 x G groups), in one read.

    A group's scale is the largest power of two that keeps its amax within the format.

    Args:
        x: [M, N] FP32, BF16 or FP16; the last group of a row may be short.
        size: elements per group, a power of two.
        dtype: an FP8 dtype.

    Returns:
        Payload [M, N] of `dtype`; exponents uint8 [M, ceil(N / size)]: scale_inv = 2^(exponent - 127), 255 if a group is not finite.

    Raises:
        ValueError: if shape or size is not supported.
    """
    check_group_cast(x, size)
    group, fmt = Group(size), of_dtype(dtype)
    amax = group.maxima(x)
    scale = scale_from_amax(amax, fmt.max, 1.0)
    exponents = (inverse(scale).view(torch.int32) >> 23).masked_fill(~amax.isfinite(), NOT_FINITE).to(torch.uint8)
    return quantize(x, group.spread(scale, x.shape), fmt).contiguous(), exponents


def group_decode(payload: torch.Tensor, exponents: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize the result of `group_cast`; NaN in a group that was not finite.

    Args:
        payload, exponents: as returned by `group_cast`.
        size: as in `group_cast`.
        dtype: FP32, BF16 or FP16. FP32 represents every value exactly, BF16 every value of at least 2^-133.

    Returns:
        [M, N] of `dtype`.

    Raises:
        ValueError: if shape or size is not supported.
    """
    check_group_cast(payload, size)
    scale_inv = (exponents.int() << 23).view(torch.float32).masked_fill(exponents == NOT_FINITE, float("nan"))
    return dequantize(payload, Group(size).spread(scale_inv, payload.shape), dtype)
