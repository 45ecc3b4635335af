"""Join the weights of several linear layers that read one input into the operand of one GEMM."""

import torch

from msamp.kernels.reference.cast_transpose import check_rows
from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse


def join_weights(
    payloads: list[torch.Tensor],
    multipliers: list[torch.Tensor],
    scale_invs: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    transpose: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast stored weights to FP8 with their smallest scale, and write them one below the other.

    Grad_input sums over the rows of all weights, so these need a common scale. A scale is a power of two: codes of a weight with a larger
    scale only lose bits where they become subnormal.

    Args:
        payloads: [N_i, K] each, as stored: in FP8, or all in one wider dtype.
        multipliers: FP32 0-dim, from payload to FP8 (`LinearScaling.weight_scales`); not read for FP8 payloads.
        scale_invs: FP32 0-dim, powers of two, of the FP8 weights.
        dtype: an FP8 dtype.
        transpose: return [K, N] instead.

    Returns:
        The codes, [sum of N_i, K], row-major, of `dtype`; the common scale_inv, FP32 0-dim, NaN if one of them is.

    Raises:
        ValueError: if a payload's rows are not a multiple of 4.
    """
    for payload in payloads:
        check_rows(payload.shape[0])
    common = torch.stack(scale_invs).amax()
    stored = payloads[0].dtype == dtype
    parts = []
    for payload, multiplier, scale_inv in zip(payloads, multipliers, scale_invs, strict=True):
        factor = scale_inv * inverse(common)
        parts.append(quantize(payload.float(), factor if stored else multiplier * factor, of_dtype(dtype)).view(torch.uint8))
    codes = torch.cat(parts)
    return (codes.t().contiguous() if transpose else codes).view(dtype), common
