"""Quantization and dequantization in plain torch: the definition that every kernel is tested against."""

import torch

from msamp.numerics.formats import Format


def cast(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round `x` to nearest even into `fmt`, saturating at +-max (infinities too); NaN stays NaN.

    Args:
        x: FP32, any shape.
        fmt: the target format.

    Returns:
        A tensor of `fmt.dtype` in the shape of `x`. FP32 and BF16 targets do not saturate: they can represent infinities.
    """
    if not fmt.scaled:
        return x.to(fmt.dtype)
    # The clamp comes first: whether torch's own float8 conversion saturates or overflows depends on its version.
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def quantize(x: torch.Tensor, scale: torch.Tensor | float, fmt: Format) -> torch.Tensor:
    """`cast(x * scale)`, the product in FP32.

    Args:
        x: FP32, BF16 or FP16, any shape.
        scale: FP32, broadcastable against `x`.
        fmt: the target format.

    Returns:
        The payload, of `fmt.dtype`.
    """
    return cast(x.float() * scale, fmt)


def dequantize(payload: torch.Tensor, scale_inv: torch.Tensor | float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`payload * scale_inv` in FP32, rounded once to `dtype`."""
    return (payload.float() * scale_inv).to(dtype)
