"""Scaled cast that leaves both layouts."""

import torch

from msamp.kernels.reference.cast import cast


def cast_transpose(
    x: torch.Tensor, scale: torch.Tensor, amax_slot: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `x` once and return the payload row-major and transposed: Hopper's FP8 GEMM takes K-major operands only.

    Args:
        x: [M, N] FP32, BF16 or FP16.
        scale: FP32, 0-dim.
        amax_slot: FP32, 0-dim, raised in place to the amax of `x`; None takes no amax.
        dtype: an FP8 dtype.

    Returns:
        Payload [M, N] and its transpose [N, M], both row-major, of `dtype`.
    """
    payload = cast(x, scale, amax_slot, dtype)
    return payload, payload.t().contiguous()
