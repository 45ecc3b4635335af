"""SwiGLU times the router's probability, with FP8 output, and its gradients in both layouts, in one read.

Twin: `msamp.kernels.reference.expert_swiglu`. Like `activate`, with one probability per row. The gradient of a probability is the sum of
grad_a times the unweighted activation over a row: each program adds up its columns, and the caller adds up the programs.
"""

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.activate import features
from msamp.kernels.reference.cast_transpose import check_rows
from msamp.kernels.triton.activate import BACKWARD, TILE_M, TILE_N, WARPS, _silu
from msamp.kernels.triton.cast import fp8_constants
from msamp.kernels.triton.cast_transpose import _higher, _layouts, _load_rows, _put, _quantise, _tell, _tile
from msamp.kernels.triton.scale_from_amax import _inverse


@triton.jit
def _probs_of_rows(probs, quad, q, left):
    """Load the probabilities of four rows of each quad, as columns."""
    p = probs + 4 * quad + 4 * q
    p0 = tl.load(p, mask=4 * q < left, other=0.0)[:, None]
    p1 = tl.load(p + 1, mask=4 * q + 1 < left, other=0.0)[:, None]
    p2 = tl.load(p + 2, mask=4 * q + 2 < left, other=0.0)[:, None]
    p3 = tl.load(p + 3, mask=4 * q + 3 < left, other=0.0)[:, None]
    return p0, p1, p2, p3


@triton.jit
def _expert_swiglu_kernel(
    y, probs, end, a, scale, amax, scale_inv, M, F,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    quad, column = tl.program_id(0).to(tl.int64) * (TILE_M // 4), tl.program_id(1).to(tl.int64) * TILE_N
    if end is not None:  # noqa: SIM102  one condition is of the compiler, one of the device
        if 4 * quad >= tl.load(end):
            return
    q, n, origin, at = _tile(quad, 2 * F, column, TILE_M, TILE_N)
    left, columns = (M - 4 * quad).to(tl.int32), n < (F - column).to(tl.int32)
    gates = _load_rows(y + origin, at, 2 * F, q, left, columns)
    ups = _load_rows(y + F + origin, at, 2 * F, q, left, columns)
    weights = _probs_of_rows(probs, quad, q, left)
    f = 1.0
    if scale is not None:
        f = tl.load(scale)
    top = tl.zeros((TILE_M // 4, TILE_N), tl.float32)
    values = ()
    for k in tl.static_range(4):
        silu, _ = _silu(gates[k].to(tl.float32), HARDWARE)
        v = silu * ups[k].to(tl.float32) * weights[k]
        top = _higher(top, v)
        values = values + (v,)  # noqa: RUF005
    if scale is not None or MANTISSA == 0:
        _, _, origin, at = _tile(quad, F, column, TILE_M, TILE_N)
        _put(values, a, None, origin, quad, column, at, F, q, n, M, left, columns, f, True, FP8_MAX, MANTISSA, BIAS, HARDWARE)
    if MANTISSA > 0:
        _tell(top, f, amax, scale_inv)


@triton.jit
def _expert_swiglu_backward_kernel(
    grad_a, y, probs, end, a_scale_inv, g, g_t, a_t, grad_probs, scale, amax, scale_inv, M, F,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    A_MAX: tl.constexpr, A_MANTISSA: tl.constexpr, A_BIAS: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    quad, column = tl.program_id(0).to(tl.int64) * (TILE_M // 4), tl.program_id(1).to(tl.int64) * TILE_N
    if end is not None:  # noqa: SIM102  one condition is of the compiler, one of the device
        if 4 * quad >= tl.load(end):
            return
    N = 2 * F
    f = 1.0
    a_f = 1.0
    if scale is not None:
        f, a_f = tl.load(scale), _inverse(tl.load(a_scale_inv))
    q, n, origin, at = _tile(quad, N, column, TILE_M, TILE_N)
    _, _, origin_a, at_a = _tile(quad, F, column, TILE_M, TILE_N)
    left, columns = (M - 4 * quad).to(tl.int32), n < (F - column).to(tl.int32)
    gates = _load_rows(y + origin, at, N, q, left, columns)
    ups = _load_rows(y + F + origin, at, N, q, left, columns)
    grads = _load_rows(grad_a + origin_a, at_a, F, q, left, columns)
    weights = _probs_of_rows(probs, quad, q, left)
    top = tl.zeros((TILE_M // 4, TILE_N), tl.float32)
    values, up_values, a_values = (), (), ()
    for k in tl.static_range(4):
        gate, up, grad = gates[k].to(tl.float32), ups[k].to(tl.float32), grads[k].to(tl.float32)
        silu, s = _silu(gate, HARDWARE)
        a = silu * up
        if scale is not None:
            part = tl.program_id(1).to(tl.int64) * M + 4 * quad
            tl.store(grad_probs + part + 4 * q + k, tl.sum(grad * a, 1), mask=4 * q + k < left)
        grad = grad * weights[k]
        v, w = grad * (s + silu * (1.0 - s)) * up, grad * silu
        top = _higher(_higher(top, v), w)
        values = values + (v,)  # noqa: RUF005
        up_values = up_values + (w,)  # noqa: RUF005
        a_values = a_values + (a * weights[k],)  # noqa: RUF005
    if scale is not None:
        _put(a_values, None, a_t, origin, quad, column, at, N, q, n, M, left, columns, a_f, True, A_MAX, A_MANTISSA, A_BIAS, HARDWARE)
        _put(values, g, g_t, origin, quad, column, at, N, q, n, M, left, columns, f, True, FP8_MAX, MANTISSA, BIAS, HARDWARE)
        origin, up_column = origin + F, column + F
        _put(up_values, g, g_t, origin, quad, up_column, at, N, q, n, M, left, columns, f, True, FP8_MAX, MANTISSA, BIAS, HARDWARE)
    _tell(top, f, amax, scale_inv)


def parts(F: int) -> int:
    """Return the number of parts in the gradient of the probabilities of rows with F features."""
    return max(1, -(-F // BACKWARD["swiglu"][1]))


def expert_swiglu(y, probs, scale, amax_slot, dtype, *, end=None):
    """See the reference twin."""
    F = features(y, "swiglu")
    y, M = y.contiguous(), y.shape[0]
    a = torch.empty(M, F, dtype=dtype, device=y.device)
    grid = (max(1, -(-M // TILE_M)), max(1, -(-F // TILE_N)))
    constants = fp8_constants(dtype, y.device)

    def launch(scale: torch.Tensor | None, amax: torch.Tensor | None, scale_inv: torch.Tensor | None) -> None:
        _expert_swiglu_kernel[grid](
            y, probs, end, a, scale, amax, scale_inv, M, F, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=WARPS, **constants
        )  # fmt: skip

    return a, _quantise(launch, scale, amax_slot, None, dtype, y.device)


def expert_swiglu_backward(grad_a, y, probs, a_scale_inv, a_dtype, scale, amax_slot, dtype, *, end=None):
    """See the reference twin."""
    check_rows(y.shape[0])
    y, grad_a = y.contiguous(), grad_a.contiguous()
    (M, F), device = grad_a.shape, y.device
    tile_m, tile_n, warps, _, _ = BACKWARD["swiglu"]
    grid = (max(1, -(-M // tile_m)), parts(F))
    g, g_t = _layouts(M, 2 * F, True, True, dtype, device)
    a_t = torch.empty((F, M), dtype=a_dtype, device=device)
    grad_probs = torch.empty((parts(F), M), dtype=torch.float32, device=device)
    of_a = fp8_constants(a_dtype, device)

    def launch(scale: torch.Tensor | None, amax: torch.Tensor | None, scale_inv: torch.Tensor | None) -> None:
        _expert_swiglu_backward_kernel[grid](
            grad_a, y, probs, end, a_scale_inv, g, g_t, a_t, grad_probs, scale, amax, scale_inv, M, F,
            TILE_M=tile_m, TILE_N=tile_n,
            A_MAX=of_a["FP8_MAX"], A_MANTISSA=of_a["MANTISSA"], A_BIAS=of_a["BIAS"], num_warps=warps, **fp8_constants(dtype, device),
        )  # fmt: skip

    return g, g_t, _quantise(launch, scale, amax_slot, None, dtype, device), a_t, grad_probs
