"""LayerNorm and RMSNorm fused with the residual addition before and the FP8 cast after, their transposed recomputation, and backward."""

import torch

from msamp.kernels.reference.cast_transpose import _store
from msamp.numerics.formats import of_dtype
from msamp.numerics.granularity import Group
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse

WIDE = (torch.bfloat16, torch.float16, torch.float32)


def check_normalize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, *, rms: bool
) -> None:
    """Raise a ValueError for shapes and dtypes that the norms do not support."""
    if x.ndim != 2 or x.dtype not in WIDE:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; a norm requires [M, N] in BF16, FP16 or FP32: flatten the tokens into M")
    if residual is not None and (residual.shape != x.shape or residual.dtype not in WIDE):
        raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}; it must be {tuple(x.shape)} like x, in BF16, FP16 or FP32")
    if any(p is not None and p.shape != x.shape[1:] for p in (weight, bias)):
        raise ValueError(f"weight is {tuple(weight.shape)}; weight and bias must be [N], {tuple(x.shape[1:])}: pass this norm's")
    if rms and bias is not None:
        raise ValueError("RMSNorm does not support a bias; pass None, or rms=False for LayerNorm")
    if dtype not in WIDE and dtype.itemsize != 1:
        raise ValueError(f"output dtype is {dtype}; choose an FP8 dtype, or bfloat16, float16 or float32 for the values before the cast")


def _deviation(x: torch.Tensor, mean: torch.Tensor, rms: bool) -> torch.Tensor:
    return x.float() if rms else x.float() - mean[:, None]


def _normalized(deviation: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = deviation * rstd[:, None]
    y *= weight.float()
    return y if bias is None else y.add_(bias.float())


def normalize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    rms: bool,
    scale_inv_slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute LayerNorm (Ba et al. 2016, equation 4) or RMSNorm (Zhang and Sennrich 2019, equation 4) of `x + residual`, cast to FP8.

    All arithmetic is FP32, on the stored sum: y = (sum - mean) * rstd * weight + bias.

    Args:
        x: [M, N] BF16, FP16 or FP32.
        residual: [M, N] BF16, FP16 or FP32, added before the norm; None adds nothing.
        weight, bias: [N] of any float dtype; bias None adds nothing.
        eps: added to the variance (RMSNorm: to the mean square).
        scale: FP32, 0-dim, a power of two (delayed scaling); None uses a just-in-time scale from the amax of y.
        amax_slot: FP32, 0-dim, raised in place to the amax of y before the cast (+inf if not finite); None does not measure it.
        dtype: an FP8 dtype; with bfloat16, float16 or float32, y is plain, and `scale` and `amax_slot` are not used.
        rms: RMSNorm; otherwise LayerNorm.
        scale_inv_slot: FP32, 0-dim, as in `cast_transpose`.

    Returns:
        sum [M, N] in the dtype of `x`, x + residual rounded once (empty if residual is None, since it would be `x`);
        y [M, N] of `dtype`; scale_inv FP32 0-dim, NaN if y is not finite (empty if y is plain or a slot is given);
        mean [M] FP32 (empty with `rms`); rstd [M] FP32.

    Raises:
        ValueError: if shapes or dtypes do not match, or an RMSNorm has a bias.
    """
    check_normalize(x, residual, weight, bias, dtype, rms=rms)
    total = x.contiguous() if residual is None else (x.float() + residual.float()).to(x.dtype).contiguous()
    mean = total.new_empty(0, dtype=torch.float32) if rms else total.float().mean(1)
    deviation = _deviation(total, mean, rms)
    rstd = deviation.square().mean(1).add_(eps).rsqrt_()
    y = _normalized(deviation, rstd, weight, bias)
    stored = x.new_empty(0) if residual is None else total
    payload, _, scale_inv, _ = _store(y, scale, amax_slot, dtype, False, False, scale_inv_slot)
    return stored, payload, scale_inv, mean, rstd


def normalize_transposed(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale_inv: torch.Tensor,
    dtype: torch.dtype,
    *,
    rms: bool,
) -> torch.Tensor:
    """Recompute in backward the transpose of `normalize`'s y, with the same codes: the grad_weight GEMM requires it K-major.

    Args:
        x: [M, N], the stored sum that was normalized.
        mean, rstd: [M] FP32, as `normalize` returned them.
        weight, bias: as in `normalize`.
        scale_inv: FP32, 0-dim, as `normalize` returned it.
        dtype: the FP8 dtype of y.
        rms: as in `normalize`.

    Returns:
        [N, M] of `dtype`, row-major.

    Raises:
        ValueError: if shapes or dtypes do not match.
    """
    check_normalize(x, None, weight, bias, dtype, rms=rms)
    y = _normalized(_deviation(x, mean, rms), rstd, weight, bias)
    return quantize(y, inverse(scale_inv), of_dtype(dtype)).t().contiguous()


def normalize_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    grad_residual: torch.Tensor | None,
    *,
    rms: bool,
    maxima: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of LayerNorm or RMSNorm, adding the gradient of the residual path in FP32 before rounding once.

    Args:
        grad_y: [M, N] of any float dtype, the gradient of y.
        x: [M, N] BF16, FP16 or FP32, the stored sum that was normalized.
        mean, rstd: [M] FP32, as `normalize` returned them.
        weight: [N] of any float dtype.
        grad_residual: [M, N], the gradient of the residual path; None adds nothing.
        rms: RMSNorm; otherwise LayerNorm.
        maxima: return the first stage of Group Scaling, for a just-in-time cast of grad_x.

    Returns:
        grad_x [M, N] in the dtype of `x`, the gradient of both `x` and the residual; grad_weight [parts, N] FP32 and grad_bias [parts, N]
        FP32 (empty with `rms`), each the sums of parts of the rows, for `sum_parts`; the largest magnitudes of parts of the rows of the
        stored grad_x, FP32 [parts, 1], +inf if one is not finite (empty without `maxima`).
    """
    grad = grad_y.float()
    normal = _deviation(x, mean, rms) * rstd[:, None]
    grad_x = grad * weight.float()
    shift = grad_x.mean(1, keepdim=True)
    grad_x = grad_x.addcmul_(normal, (grad_x * normal).mean(1, keepdim=True), value=-1.0)
    if not rms:
        grad_x -= shift
    grad_x *= rstd[:, None]
    if grad_residual is not None:
        grad_x += grad_residual
    grad_bias = grad.new_empty(0) if rms else grad.sum(0, keepdim=True)
    stored = grad_x.to(x.dtype).contiguous()
    tops = Group(stored.shape[1]).maxima(stored) if maxima else grad.new_empty(0)
    return stored, normal.mul_(grad).sum(0, keepdim=True), grad_bias, tops
