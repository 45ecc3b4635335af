"""Cast with a given scale and divide the columns by powers of two: the weight behind a Smooth-SwiGLU, and that weight's gradient."""

import torch

from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import quantize


def cast_columns(x: torch.Tensor, scale: torch.Tensor | None, channel_scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast `x * scale / channel_scale` to FP8, or round it to another dtype.

    Args:
        x: [N, K] FP32, BF16, FP16, or FP8 with the payload's own values.
        scale: FP32, 0-dim, a power of two; None is 1.
        channel_scale: FP32 [K], powers of two from 2^-126 to 2^126: a product of FP8 payloads sums over the K columns, of which the other
            operand has been multiplied by these.
        dtype: an FP8 dtype, or FP32, BF16 or FP16, which do not saturate.

    Returns:
        [N, K] of `dtype`, row-major. For an `x` of that dtype and no scale it is exact but for values that become subnormal.

    Raises:
        ValueError: for channel scales that are not FP32 [K].
    """
    check_channel_scale(x, channel_scale)
    factor = channel_scale.reciprocal() if scale is None else channel_scale.reciprocal() * scale
    if dtype.itemsize > 1:
        return (x.float() * factor).to(dtype).contiguous()
    return quantize(x, factor, of_dtype(dtype)).contiguous()


def check_channel_scale(x: torch.Tensor, channel_scale: torch.Tensor) -> None:
    """Raise a ValueError unless there is one FP32 number per column of `x`."""
    if channel_scale.dtype != torch.float32 or channel_scale.shape != x.shape[1:]:
        raise ValueError(
            f"channel_scale is {channel_scale.dtype} {tuple(channel_scale.shape)}; for {tuple(x.shape)} it must be torch.float32 "
            f"{tuple(x.shape[1:])}"
        )
