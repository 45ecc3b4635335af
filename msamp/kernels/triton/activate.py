"""GELU, SwiGLU and squared ReLU with FP8 output, and their gradients in both layouts, in one read.

Twin: `msamp.kernels.reference.activate`.
"""

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.activate import features
from msamp.kernels.triton.cast import fp8_constants
from msamp.kernels.triton.cast_transpose import (
    _higher,
    _inverse,
    _layouts,
    _load_rows,
    _partial_sums,
    _put,
    _put_sums,
    _quantise,
    _tell,
    _tile,
)

TILE_M, TILE_N, WARPS = 32, 256, 8
# Rows, columns and warps of a tile, tiles per program and pipeline stages; SwiGLU's second half of y fills the registers.
BACKWARD = {"gelu": (64, 64, 4, 1, 1), "swiglu": (32, 64, 4, 4, 1), "squared-relu": (64, 64, 4, 1, 1)}


@triton.jit
def _sigmoid(z, HARDWARE: tl.constexpr):
    """1 / (1 + 2^z). On a GPU it flushes subnormals to zero, since supporting them costs more than the function itself."""
    if HARDWARE:
        s = tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.ftz.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
            "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        s = 1.0 / (1.0 + tl.exp2(z))
    return s


@triton.jit
def _gelu(y, HARDWARE: tl.constexpr):
    """GELU of `y`, its sigmoid and the clamped y^2. Every multiply-add is an explicit `fma`: the compiler must not contract it differently
    in forward and backward, which must give the same codes."""
    square = tl.minimum(y * y, 256.0)
    # -log2(e) * 2 u, with 2 u = 1.59577 (y + 0.044715 y^3)
    s = _sigmoid(y * tl.fma(square, -0.10294324, -2.3022082), HARDWARE)
    return y * s, s, square


@triton.jit
def _silu(y, HARDWARE: tl.constexpr):
    """silu of `y`, and its sigmoid."""
    s = _sigmoid(y * -1.4426950408889634, HARDWARE)
    return y * s, s


@triton.jit
def _relu(y):
    """max(y, 0), and NaN for NaN."""
    return tl.where(y <= 0.0, 0.0, y)


@triton.jit
def _tell_channels(top, channel_amax, n, columns):
    """Raise `channel_amax` [columns of this tile] to the maxima of `top`, +inf for NaN. Nearly all programs find a value as large as theirs
    there already, and leave the atomic out: it would cost more than the read."""
    highest = tl.max(tl.where(top == top, top, float("inf")), 0)
    higher = columns & (highest > tl.load(channel_amax + n, mask=columns, other=0.0))
    slots = channel_amax.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(slots + n, highest.to(tl.int32, bitcast=True), mask=higher, sem="relaxed")


@triton.jit
def _activate_kernel(
    y, a, scale, amax, scale_inv, channel_scale, channel_amax, M, F,
    SWIGLU: tl.constexpr, SQUARED_RELU: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    quad, column = tl.program_id(0).to(tl.int64) * (TILE_M // 4), tl.program_id(1).to(tl.int64) * TILE_N
    N = F
    if SWIGLU:
        N = 2 * F
    q, n, origin, at = _tile(quad, N, column, TILE_M, TILE_N)
    left, columns = (M - 4 * quad).to(tl.int32), n < (F - column).to(tl.int32)
    firsts = _load_rows(y + origin, at, N, q, left, columns)
    if SWIGLU:
        ups = _load_rows(y + F + origin, at, N, q, left, columns)
    f = 1.0
    if scale is not None:
        f = tl.load(scale)
    top = tl.zeros((TILE_M // 4, TILE_N), tl.float32)
    values = ()
    for k in tl.static_range(4):
        if SWIGLU:
            silu, _ = _silu(firsts[k].to(tl.float32), HARDWARE)
            v = silu * ups[k].to(tl.float32)
        elif SQUARED_RELU:
            relu = _relu(firsts[k].to(tl.float32))
            v = relu * relu
        else:
            v, _, _ = _gelu(firsts[k].to(tl.float32), HARDWARE)
        top = _higher(top, v)
        if channel_scale is not None:
            v = v * tl.load(channel_scale + column + n, mask=columns, other=1.0)[None, :]
        values = values + (v,)  # noqa: RUF005
    if channel_amax is not None:
        _tell_channels(top, channel_amax + column, n, columns)
    if scale is not None or MANTISSA == 0:
        _, _, origin, at = _tile(quad, F, column, TILE_M, TILE_N)
        _put(values, a, None, origin, quad, column, at, F, q, n, M, left, columns, f, True, FP8_MAX, MANTISSA, BIAS, HARDWARE)
    if MANTISSA > 0:
        _tell(top, f, amax, scale_inv)


@triton.jit
def _activate_backward_kernel(
    grad_a, y, a_scale_inv, g, g_t, a_t, sums, scale, amax, scale_inv, channel_scale, M, F,
    SWIGLU: tl.constexpr, SQUARED_RELU: tl.constexpr, ALIGNED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    A_MAX: tl.constexpr, A_MANTISSA: tl.constexpr, A_BIAS: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1).to(tl.int64) * TILE_N
    N = F
    if SWIGLU:
        N = 2 * F
    f = 1.0
    a_f = 1.0
    if scale is not None:
        f, a_f = tl.load(scale), _inverse(tl.load(a_scale_inv))
    top = tl.zeros((TILE_M // 4, TILE_N), tl.float32)
    total, up_total = top, top
    for tile in tl.range(0, TILES, num_stages=STAGES):
        quad = (tl.program_id(0).to(tl.int64) * TILES + tile) * (TILE_M // 4)
        q, n, origin, at = _tile(quad, N, column, TILE_M, TILE_N)
        _, _, origin_a, at_a = _tile(quad, F, column, TILE_M, TILE_N)
        left, columns = (M - 4 * quad).to(tl.int32), n < (F - column).to(tl.int32)
        firsts = _load_rows(y + origin, at, N, q, left, columns)
        if SWIGLU:
            ups = _load_rows(y + F + origin, at, N, q, left, columns)
        grads = _load_rows(grad_a + origin_a, at_a, F, q, left, columns)
        values, up_values, a_values = (), (), ()
        for k in tl.static_range(4):
            v, grad = firsts[k].to(tl.float32), grads[k].to(tl.float32)
            if SWIGLU:
                up = ups[k].to(tl.float32)
                silu, s = _silu(v, HARDWARE)
                a, v, w = silu * up, grad * (s + silu * (1.0 - s)) * up, grad * silu
                top, up_total = _higher(top, w, ALIGNED), up_total + w
                up_values = up_values + (w,)  # noqa: RUF005
            elif SQUARED_RELU:
                relu = _relu(v)
                a, v = relu * relu, relu * 2.0 * grad
            else:
                a, s, square = _gelu(v, HARDWARE)
                # Multiply by y last: if it is huge, s (1 - s) is 0, and if it is NaN or infinite, so is the gradient.
                v = grad * (s + s * (1.0 - s) * v * (square * 0.21406445 + 1.5957691))
            top, total = _higher(top, v, ALIGNED), total + v
            values = values + (v,)  # noqa: RUF005
            if channel_scale is not None:
                a = a * tl.load(channel_scale + column + n, mask=columns, other=1.0)[None, :]
            a_values = a_values + (a,)  # noqa: RUF005
        if scale is not None:
            _put(
                a_values, None, a_t, origin, quad, column, at, N, q, n, M, left, columns, a_f,
                ALIGNED, A_MAX, A_MANTISSA, A_BIAS, HARDWARE,
            )  # fmt: skip
        if scale is not None or MANTISSA == 0:
            _put(values, g, g_t, origin, quad, column, at, N, q, n, M, left, columns, f, ALIGNED, FP8_MAX, MANTISSA, BIAS, HARDWARE)
        if SWIGLU and (scale is not None or MANTISSA == 0):
            origin, up_column = origin + F, column + F
            _put(up_values, g, g_t, origin, quad, up_column, at, N, q, n, M, left, columns, f, ALIGNED, FP8_MAX, MANTISSA, BIAS, HARDWARE)
    n = tl.arange(0, TILE_N)
    columns = n < (F - column).to(tl.int32)
    if scale is not None or MANTISSA == 0:
        _put_sums(total, sums, column, n, N, columns)
        if SWIGLU:
            _put_sums(up_total, sums, column + F, n, N, columns)
    if MANTISSA > 0:
        _tell(top, f, amax, scale_inv)


def parts(M: int, kind: str) -> int:
    """Return the number of parts in the column sums of a gradient with M rows."""
    return max(1, -(-M // (BACKWARD[kind][0] * BACKWARD[kind][3])))


def activate(y, kind, scale, amax_slot, dtype, *, scale_inv_slot=None, channel_scale=None, channel_amax_slot=None):
    """See the reference twin."""
    F = features(y, kind)
    y, M = y.contiguous(), y.shape[0]
    a = torch.empty(M, F, dtype=dtype, device=y.device)
    grid = (max(1, -(-M // TILE_M)), max(1, -(-F // TILE_N)))
    constants = fp8_constants(dtype, y.device)

    def launch(scale: torch.Tensor | None, amax: torch.Tensor | None, scale_inv: torch.Tensor | None) -> None:
        _activate_kernel[grid](
            y, a, scale, amax, scale_inv, channel_scale, channel_amax_slot, M, F,
            SWIGLU=kind == "swiglu", SQUARED_RELU=kind == "squared-relu", TILE_M=TILE_M, TILE_N=TILE_N, num_warps=WARPS, **constants,
        )  # fmt: skip

    return a, _quantise(launch, scale, amax_slot, scale_inv_slot, dtype, y.device)


def activate_backward(
    grad_a, y, kind, a_scale_inv, a_dtype, scale, amax_slot, dtype, *, colsum=False, scale_inv_slot=None, channel_scale=None
):
    """See the reference twin."""
    y, grad_a, quantised = y.contiguous(), grad_a.contiguous(), dtype.itemsize == 1
    (M, F), N, device = grad_a.shape, y.shape[1], y.device
    tile_m, tile_n, warps, tiles, stages = BACKWARD[kind]
    grid = (parts(M, kind), max(1, -(-F // tile_n)))
    g, g_t = _layouts(M, N, True, quantised, dtype, device)
    a_t = torch.empty((F, M) if quantised else 0, dtype=a_dtype, device=device)
    partial = _partial_sums(colsum, grid[0], N, device)
    of_a = fp8_constants(a_dtype, device)

    def launch(scale: torch.Tensor | None, amax: torch.Tensor | None, scale_inv: torch.Tensor | None) -> None:
        _activate_backward_kernel[grid](
            grad_a, y, a_scale_inv, g, g_t if quantised else None, a_t if quantised else None, partial if colsum else None,
            scale, amax, scale_inv, channel_scale, M, F, SWIGLU=kind == "swiglu", SQUARED_RELU=kind == "squared-relu", ALIGNED=M % 4 == 0,
            TILE_M=tile_m, TILE_N=tile_n, TILES=tiles, STAGES=stages,
            A_MAX=of_a["FP8_MAX"], A_MANTISSA=of_a["MANTISSA"], A_BIAS=of_a["BIAS"], num_warps=warps, **fp8_constants(dtype, device),
        )  # fmt: skip

    return g, g_t, _quantise(launch, scale, amax_slot, scale_inv_slot, dtype, device), a_t, partial
