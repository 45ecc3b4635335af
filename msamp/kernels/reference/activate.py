"""GELU, SwiGLU and squared ReLU, cast to the operand of the next GEMM, and their gradients."""

import torch

from msamp.kernels.reference.amax import amax
from msamp.kernels.reference.cast_transpose import _store
from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse

KINDS = ("gelu", "swiglu", "squared-relu")

# 0.5 (1 + tanh u) = sigmoid(2 u), which keeps its precision when tanh is close to -1: 2 u = TWICE_SLOPE (y + CUBIC y^3).
TWICE_SLOPE = 1.5957691216057308
CUBIC = 0.044715
# Upper limit of y^2: above it the sigmoid is 0 or 1 in FP32 and its derivative 0; an infinite y^2 would turn that into NaN.
SQUARE_LIMIT = 256.0


def features(y: torch.Tensor, kind: str) -> int:
    """Return F, the width of the output of the activation `kind` for `y`; ValueError for an unsupported kind or input."""
    if kind not in KINDS:
        raise ValueError(f"activation is {kind!r}; choose one of {', '.join(KINDS)}")
    if y.ndim != 2 or (kind == "swiglu" and y.shape[1] % 2):
        raise ValueError(f"input of {kind} is {tuple(y.shape)}; it must be [tokens, features], for swiglu [tokens, 2 x features]")
    return y.shape[1] // 2 if kind == "swiglu" else y.shape[1]


def _activation(y: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the activation, FP32 [M, F]."""
    if kind == "swiglu":
        gate, up = y.float().chunk(2, dim=1)
        return torch.sigmoid(gate).mul_(gate).mul_(up)
    y = y.float()
    if kind == "squared-relu":
        return _relu(y).square_()
    return _gelu_sigmoid(y, y.square().clamp_(max=SQUARE_LIMIT)).mul_(y)


def _relu(y: torch.Tensor) -> torch.Tensor:
    """Return max(y, 0), and NaN for NaN, so that the amax shows it."""
    return torch.where(y <= 0, 0.0, y)


def _gelu_sigmoid(y: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    return (square * (TWICE_SLOPE * CUBIC)).add_(TWICE_SLOPE).mul_(y).sigmoid_()


def _derivative(grad_a: torch.Tensor, y: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the gradient of `y`, FP32 [M, F or 2F]."""
    grad, y = grad_a.float(), y.float()
    if kind == "swiglu":
        gate, up = y.chunk(2, dim=1)
        s = torch.sigmoid(gate)
        silu = gate * s
        return torch.cat([grad * (s + silu * (1 - s)) * up, grad * silu], dim=1)
    if kind == "squared-relu":
        return _relu(y).mul_(2.0).mul_(grad)
    square = y.square().clamp_(max=SQUARE_LIMIT)
    s = _gelu_sigmoid(y, square)
    slope = square.mul_(3 * TWICE_SLOPE * CUBIC).add_(TWICE_SLOPE)
    return slope.mul_(s * (1 - s)).mul_(y).add_(s).mul_(grad)


def activate(
    y: torch.Tensor,
    kind: str,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    scale_inv_slot: torch.Tensor | None = None,
    channel_scale: torch.Tensor | None = None,
    channel_amax_slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the activation between the two linear layers of an MLP, in the format of the second one's input.

    "gelu" is the tanh form (Hendrycks and Gimpel, 2016), y/2 (1 + tanh(0.79788 (y + 0.044715 y^3))); "swiglu" (Shazeer, 2020) is
    silu of the first half of the columns times the second half; "squared-relu" is max(y, 0)^2 (So et al., 2021).

    Args:
        y: BF16, FP16 or FP32, [M, F], for "swiglu" [M, 2F].
        kind: one of `KINDS`.
        scale: FP32, 0-dim, a power of two; None uses a just-in-time scale from the result's amax.
        amax_slot: FP32, 0-dim, raised in place to the amax of the result (+inf if not finite); None does not measure it.
        dtype: of the result; a wide dtype gives a plain result without scale and amax.
        scale_inv_slot: FP32, 0-dim, as in `cast_transpose`.
        channel_scale: FP32 [F], powers of two by which the channels are multiplied before they are stored (Smooth-SwiGLU, see
            `msamp.nn.channel_scales`); not with a just-in-time scale. The amaxes are those before this multiplication.
        channel_amax_slot: FP32 [F], raised in place to the amaxes of the channels (+inf if not finite); None does not measure them.

    Returns:
        [M, F] of `dtype`; scale_inv FP32, 0-dim, NaN if the result is not finite (empty with a wide `dtype`, or if a slot is given).

    Raises:
        ValueError: if kind or shape is not supported.
    """
    features(y, kind)
    a = _activation(y, kind)
    if channel_amax_slot is not None and a.shape[0]:
        channel_amax_slot.copy_(torch.maximum(channel_amax_slot, a.abs().amax(0).nan_to_num_(nan=float("inf"), posinf=float("inf"))))
    if channel_scale is None:
        stored, _, scale_inv, _ = _store(a, scale, amax_slot, dtype, False, False, scale_inv_slot)
        return stored, scale_inv
    if amax_slot is not None:
        amax_slot.copy_(torch.maximum(amax_slot, amax(a)))
    stored, _, scale_inv, _ = _store(a * channel_scale, scale, None, dtype, False, False, scale_inv_slot)
    return stored, scale_inv


def activate_backward(
    grad_a: torch.Tensor,
    y: torch.Tensor,
    kind: str,
    a_scale_inv: torch.Tensor,
    a_dtype: torch.dtype,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    colsum: bool = False,
    scale_inv_slot: torch.Tensor | None = None,
    channel_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradient of `activate`'s input, cast for the GEMMs, and the transposed activation, which forward did not save.

    Args:
        grad_a: [M, F] BF16, FP16 or FP32.
        y: the input of `activate`.
        kind: one of `KINDS`.
        a_scale_inv: as returned by `activate`.
        a_dtype: the FP8 dtype of `activate`.
        scale: of the gradient, FP32, 0-dim, a power of two; None uses a just-in-time scale.
        amax_slot: FP32, 0-dim, raised in place to the amax of the gradient (+inf if not finite); None does not measure it.
        dtype: of the gradient; a wide dtype gives a plain gradient without transposes and scale_inv.
        colsum: also return the column sums of the gradient before the cast: the gradient of the first layer's bias.
        scale_inv_slot: FP32, 0-dim, as in `cast_transpose`.
        channel_scale: FP32 [F], as given to `activate`; it changes nothing but the transposed activation.

    Returns:
        Gradient g [M, F or 2F] and its transpose [F or 2F, M], of `dtype`; scale_inv FP32, 0-dim, NaN if g is not finite;
        the transpose [F, M] of `activate`'s result, with the same codes; column sums of parts of the rows, FP32 [parts, F or 2F], for
        `sum_parts`. Results that are not requested are empty, and so is scale_inv if a slot is given.
    """
    quantised = dtype.itemsize == 1
    g, g_t, scale_inv, sums = _store(_derivative(grad_a, y, kind), scale, amax_slot, dtype, quantised, colsum, scale_inv_slot)
    if not quantised:
        return g, g_t, scale_inv, y.new_empty(0, dtype=a_dtype), sums
    a = _activation(y, kind)
    a = a if channel_scale is None else a * channel_scale
    a_t = quantize(a, inverse(a_scale_inv), of_dtype(a_dtype)).t().contiguous()
    return g, g_t, scale_inv, a_t, sums
