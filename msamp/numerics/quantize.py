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


def quantize_stochastic(
    x: torch.Tensor, scale: torch.Tensor | float, fmt: Format, generator: torch.Generator | None = None
) -> torch.Tensor:
    """`quantize` with stochastic rounding: round to one of the two neighbouring values of `fmt`, so that the mean is `x * scale`.

    Saturates at +-max; NaN stays NaN, and values that `fmt` can represent are exact. The probability of rounding up is a multiple of 2^-24.
    That causes a bias, of at most 2^-24 of the smallest subnormal, only below half of the smallest subnormal.

    Args:
        x: FP32, BF16 or FP16, any shape.
        scale: FP32, broadcastable against `x`.
        fmt: E4M3, E5M2 or FP16.
        generator: source of random numbers, on the device of `x`; torch's default generator if None.

    Returns:
        The payload, of `fmt.dtype`.

    Raises:
        ValueError: if `fmt` has no scale.
    """
    if not fmt.scaled:
        raise ValueError(f"stochastic rounding into {fmt} is not defined; choose fp8-e4m3, fp8-e5m2 or fp16")
    y = (x.float() * scale).clamp(-fmt.max, fmt.max)
    magnitude = y.abs()
    # The exponent field alone is the power of two at or below a value; below the smallest normal value the spacing is constant.
    binade = (magnitude.clamp(min=fmt.tiny).view(torch.int32) & 0x7F800000).view(torch.float32)
    spacing = binade * 2.0**-fmt.mantissa_bits
    steps = magnitude / spacing
    down = steps.floor()
    # A comparison, because adding a random number to `steps` would round in FP32 and move representable values.
    up = torch.rand(y.shape, generator=generator, device=y.device, dtype=torch.float32) < steps - down
    return torch.copysign((down + up) * spacing, y).to(fmt.dtype)
