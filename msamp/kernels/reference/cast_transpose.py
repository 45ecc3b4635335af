"""Cast with one scale to either layout or both, with the column sums of the input; transpose a payload; divide the columns of a cast."""

import torch

from msamp.kernels.reference.amax import amax
from msamp.kernels.reference.scale_from_amax import scale_from_maxima
from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse, scale_from_amax


def cast_transpose(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    row: bool = False,
    col: bool = False,
    colsum: bool = False,
    scale_inv_slot: torch.Tensor | None = None,
    maxima: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast `x` and return the payload, its transpose, or both. Hopper's FP8 GEMM only supports K-major operands, so grad_weight requires
    the transpose (FP8-LM section 2).

    Args:
        x: [M, N] FP32, BF16 or FP16.
        scale: FP32, 0-dim, a power of two; None uses a just-in-time scale from the amax of `x`.
        amax_slot: FP32, 0-dim, raised in place to the amax of `x` (+inf if not finite); None does not measure it.
        dtype: an FP8 dtype.
        row: return the payload.
        col: return its transpose.
        colsum: return the column sums of `x`, which for a grad_output are the bias gradient. Only together with `row` or `col`.
        scale_inv_slot: FP32, 0-dim, 16-byte aligned, containing 0: receives scale_inv, instead of new memory that must first be zeroed.
        maxima: FP32, any shape, contiguous: the first stage of Group Scaling (`msamp.nn.group_scaling`), from the
            kernel that wrote `x`. The same scale follows from them without a read of `x`. Only if `scale` is None.

    Returns:
        Payload [M, N] and transpose [N, M], both row-major, of `dtype`; scale_inv (FP32, 0-dim; NaN if `x` is not finite, since an infinity
        saturates in the payload); column sums of parts of the rows, FP32 [parts, N], for `sum_parts`. Results that are not requested are
        empty, and so is scale_inv if a slot is given.

    Raises:
        ValueError: for column sums alone.
    """
    check_asked(row=row, col=col, colsum=colsum)
    taken, fmt = amax(x), of_dtype(dtype)
    if scale is None:
        scale = scale_from_amax(taken, fmt.max) if maxima is None else scale_from_maxima(maxima, fmt.max)
    if amax_slot is not None:
        amax_slot.copy_(torch.maximum(amax_slot, taken))
    payload = quantize(x, scale, fmt).contiguous() if row or col else x.new_empty(0, dtype=dtype)
    transposed = payload.t().contiguous() if col else x.new_empty(0, dtype=dtype)
    sums = x.sum(0, keepdim=True, dtype=torch.float32) if colsum else x.new_empty(0, dtype=torch.float32)
    scale_inv = inverse(scale).masked_fill(~taken.isfinite(), float("nan"))
    if scale_inv_slot is not None:
        scale_inv_slot.copy_(scale_inv)
        scale_inv = scale_inv.new_empty(0)
    return payload if row else x.new_empty(0, dtype=dtype), transposed, scale_inv, sums


def check_asked(*, row: bool, col: bool, colsum: bool) -> None:
    """Raise a ValueError for column sums alone: Triton 3.6 miscompiles a kernel that stores nothing else (H200: half the sums)."""
    if colsum and not (row or col):
        raise ValueError("colsum requires row or col; set one of them, or use x.sum(0)")


def check_rows(rows: int) -> None:
    """Raise a ValueError unless rows are a multiple of 4: ptxas of CUDA 12.8 miscompiles the kernels of experts' and joined weights for
    other numbers (H200: bytes of the transpose were stored before they were computed). Groups of tokens are padded to 4 and more anyway."""
    if rows % 4:
        raise ValueError(f"there are {rows} rows; their transpose needs a multiple of 4: pad groups, or choose such a width")


def cast_transposed(x: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Recompute in backward the transpose of `cast_transpose`'s payload, with the same codes.

    Args:
        x: [M, N] FP32, BF16 or FP16.
        scale_inv: FP32, 0-dim, as `cast_transpose` returned it.
        dtype: the FP8 dtype of `cast_transpose`.

    Returns:
        [N, M] of `dtype`, row-major.
    """
    return quantize(x, inverse(scale_inv), of_dtype(dtype)).t().contiguous()


def _store(
    v: torch.Tensor,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    col: bool,
    colsum: bool,
    scale_inv_slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output of an operator with the FP32 result `v` [M, N]: `cast_transpose` of it, or plain `v` in a wide `dtype`."""
    if dtype.itemsize == 1:
        return cast_transpose(v, scale, amax_slot, dtype, row=True, col=col, colsum=colsum, scale_inv_slot=scale_inv_slot)
    sums = v.sum(0, keepdim=True) if colsum else v.new_empty(0)
    return v.to(dtype), v.new_empty(0, dtype=dtype), v.new_empty(0), sums


def transpose(x: torch.Tensor) -> torch.Tensor:
    """Return the transpose [N, M], row-major, of a payload [M, N] of a 1-byte dtype, with unchanged codes."""
    return x.view(torch.uint8).t().contiguous().view(x.dtype)


def cast_columns(x: torch.Tensor, scale: torch.Tensor | None, channel_scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast `x * scale / channel_scale` to FP8, or round it to another dtype: the weight behind a Smooth-SwiGLU, and its gradient.

    Args:
        x: [N, K] FP32, BF16, FP16, or FP8 with the payload's own values.
        scale: FP32, 0-dim, a power of two; None is 1.
        channel_scale: FP32 [K], powers of two from 2^-126 to 2^126: a product of FP8 payloads sums over the K columns, of which the other
            operand has been multiplied by these.
        dtype: an FP8 dtype, or FP32, BF16 or FP16, which do not saturate.

    Returns:
        [N, K] of `dtype`, row-major. For an `x` of that dtype and no scale it is exact but for values that become subnormal.
    """
    factor = channel_scale.reciprocal() if scale is None else channel_scale.reciprocal() * scale
    if dtype.itemsize > 1:
        return (x.float() * factor).to(dtype).contiguous()
    return quantize(x, factor, of_dtype(dtype)).contiguous()
