"""Scaled cast that leaves either layout or both, and the column sums of its input."""

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
    """Quantise `x` once; Hopper's FP8 GEMM takes K-major operands only, so grad_weight wants the transpose (FP8-LM section 2).

    Args:
        x: [M, N] FP32, BF16 or FP16.
        scale: FP32, 0-dim, a power of two; None takes it from the amax of `x`, just in time.
        amax_slot: FP32, 0-dim, raised in place to the amax of `x` (+inf where it is not finite); None takes no amax.
        dtype: an FP8 dtype.
        row: give the payload.
        col: give its transpose.
        colsum: give the column sums of `x`: of a grad_output, the gradient of the bias. Only beside `row` or `col`.
        scale_inv_slot: FP32, 0-dim, 16-byte aligned, holding 0: where scale_inv is left instead of in memory that this call would
            have to zero first.
        maxima: FP32, any shape, contiguous: the first stage of Group Scaling (`msamp.numerics.range_expand.two_stage_amax`), as the
            producer of `x` left it. The same scale follows from them without a read of `x`. Only where `scale` is None.

    Returns:
        Payload [M, N] and transpose [N, M], both row-major, of `dtype`; scale_inv (FP32, 0-dim; NaN where `x` is not finite,
        since an infinity saturates in the payload); column sums of parts of the rows, FP32 [parts, N], for `sum_parts`. What is not
        asked for is empty, and so is scale_inv where it has a slot.

    Raises:
        ValueError: for column sums alone; for `maxima` beside a scale, or that are not FP32.
    """
    check_asked(row=row, col=col, colsum=colsum)
    check_maxima(maxima, scale)
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
    """ValueError for column sums alone: Triton 3.6 compiles a kernel that stores nothing else wrongly (H200: every other column's sum)."""
    if colsum and not (row or col):
        raise ValueError("column sums come with a cast only: ask for row or col too, or take x.sum(0)")


def check_maxima(maxima: torch.Tensor | None, scale: torch.Tensor | None) -> None:
    """ValueError for `maxima` beside a scale, or that are not FP32."""
    if maxima is not None and scale is not None:
        raise ValueError("maxima stand in for the amax of a just-in-time cast: give scale None with them, or leave them out")
    if maxima is not None and maxima.dtype != torch.float32:
        raise ValueError(f"maxima are {maxima.dtype}; the largest magnitudes of the parts of a tensor are torch.float32")


def cast_transposed(x: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The transpose of what `cast_transpose` gave, the same codes, made again in backward.

    Args:
        x: [M, N] FP32, BF16 or FP16.
        scale_inv: FP32, 0-dim, as `cast_transpose` returned it.
        dtype: the FP8 dtype of then.

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
    scale_inv_slot: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output of a producer with the FP32 result `v` [M, N]: `cast_transpose` of it, or `v` plain in a wide `dtype`."""
    if dtype.itemsize == 1:
        return cast_transpose(v, scale, amax_slot, dtype, row=True, col=col, colsum=colsum, scale_inv_slot=scale_inv_slot)
    sums = v.sum(0, keepdim=True) if colsum else v.new_empty(0)
    return v.to(dtype), v.new_empty(0, dtype=dtype), v.new_empty(0), sums
