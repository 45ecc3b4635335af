"""Rotary embedding of packed QKV, in place or cast to FP8, and its gradient in both layouts. Twin: `msamp.kernels.reference.rotary`.

A forward program processes some tokens of one query group, whose heads share the loaded cos and sin. A backward program processes one head,
since two heads in sequence would wait for each other's memory. The two channels of a rotated pair are at the same position in two tiles; so
are the channels above the rotated ones, which do not change.
"""

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.rotary import check_tables, head_width, table_rows
from msamp.kernels.triton.cast import _rounded, fp8_constants
from msamp.kernels.triton.cast_transpose import _code, _higher, _layouts, _partial_sums, _put, _put_sums, _quantise, _tell, nothing
from msamp.kernels.triton.scale_from_amax import scale_from_amax
from msamp.numerics.formats import of_dtype

TILE_M, WARPS = 16, 4
BACKWARD_TILE_M = 32
CHANNELS_A_WARP = 32  # channels of half a head per warp, in backward


@triton.jit
def _pairs(D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr):
    """Return the channels of a head in two halves, with rotated pairs at the same position, and a mask of valid positions."""
    j = tl.arange(0, HALF)
    channels = j < D // 2
    if R == D:
        c1, c2 = j, j + D // 2
    else:
        c1, c2 = tl.where(j < R // 2, j, j + R // 2), tl.where(j < R // 2, j + R // 2, j + D // 2)
    return c1, c2, channels


@triton.jit
def _angles(cos, sin, position, rows, c1, c2, R: tl.constexpr):
    """Return cos and sin of both halves in FP32; 1 and 0 for channels that are not rotated."""
    at = position[:, None] * R
    in1, in2 = rows[:, None] & (c1 < R)[None, :], rows[:, None] & (c2 < R)[None, :]
    cos1, sin1 = tl.load(cos + at + c1[None, :], mask=in1, other=1.0), tl.load(sin + at + c1[None, :], mask=in1, other=0.0)
    cos2, sin2 = tl.load(cos + at + c2[None, :], mask=in2, other=1.0), tl.load(sin + at + c2[None, :], mask=in2, other=0.0)
    return cos1.to(tl.float32), sin1.to(tl.float32), cos2.to(tl.float32), sin2.to(tl.float32)


@triton.jit
def _position(token, batch, table, APART: tl.constexpr):
    """Return the row of a token in tables of `table` rows."""
    return token % table if APART else token // batch


@triton.jit
def _load_pair(part, line, c1, c2, inside):
    x1 = tl.load(part + line[:, None] + c1[None, :], mask=inside, other=0.0)
    x2 = tl.load(part + line[:, None] + c2[None, :], mask=inside, other=0.0)
    return x1, x2


@triton.jit
def _line(token, batch, s_stride, b_stride):
    """Offsets of tokens, batch inner, in a tensor [s, b, ...]."""
    return (token // batch).to(tl.int64) * s_stride + (token % batch).to(tl.int64) * b_stride


@triton.jit
def _rotary_kernel(
    qkv, cos, sin, tokens, batch, groups, table,
    PER_GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, TILE_M: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    rows = token < tokens
    c1, c2, channels = _pairs(R, R, HALF)
    inside = rows[:, None] & channels[None, :]
    cos1, sin1, cos2, sin2 = _angles(cos, sin, _position(token, batch, table, APART), rows, c1, c2, R)
    group, line = tl.program_id(1), token.to(tl.int64) * (groups * (PER_GROUP + 2) * D)
    first, key = group * (PER_GROUP + 2), group * (PER_GROUP + 2) + PER_GROUP
    if APART:
        first, key = group * PER_GROUP, groups * PER_GROUP + group
    for head in range(PER_GROUP + 1):
        here = qkv + (first + head if head < PER_GROUP else key) * D
        x1, x2 = _load_pair(here, line, c1, c2, inside)
        x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
        tl.store(here + line[:, None] + c1[None, :], (x1 * cos1 - x2 * sin1).to(qkv.dtype.element_ty), mask=inside)
        tl.store(here + line[:, None] + c2[None, :], (x2 * cos2 + x1 * sin2).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _put_codes(
    x1, x2, cos1, sin1, cos2, sin2, y, line, c1, c2, inside, top, scale, less1, less2,
    STORE: tl.constexpr, FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of one head, round them as `_rotary_kernel` does, subtract `less1` and `less2`, store their codes in `y`, and update
    the maximum `top`."""
    a, b = x1.to(tl.float32), x2.to(tl.float32)
    v1 = _rounded(a * cos1 - b * sin1, x1.dtype, HARDWARE).to(tl.float32) - less1
    v2 = _rounded(b * cos2 + a * sin2, x1.dtype, HARDWARE).to(tl.float32) - less2
    if STORE:
        tl.store(y + line[:, None] + c1[None, :], _code(v1 * scale, FP8_MAX, MANTISSA, BIAS, HARDWARE), mask=inside)
        tl.store(y + line[:, None] + c2[None, :], _code(v2 * scale, FP8_MAX, MANTISSA, BIAS, HARDWARE), mask=inside)
    return _higher(_higher(top, v1), v2)


@triton.jit
def _rotary_cast_kernel(
    qkv, query, key, value, cos, sin, center, scales, amaxes, scale_invs, tokens, batch, groups,
    PER_GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, TILE_M: tl.constexpr, STORE: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    rows = token < tokens
    c1, c2, channels = _pairs(D, R, HALF)
    inside = rows[:, None] & channels[None, :]
    cos1, sin1, cos2, sin2 = _angles(cos, sin, token // batch, rows, c1, c2, R)
    at = token.to(tl.int64) * groups + tl.program_id(1)
    line, narrow = at * ((PER_GROUP + 2) * D), at * D
    q_scale, k_scale, v_scale = 1.0, 1.0, 1.0
    if STORE:
        q_scale, k_scale, v_scale = tl.load(scales), tl.load(scales + 1), tl.load(scales + 2)
    nothing = tl.zeros((TILE_M, HALF), tl.float32)
    top = nothing
    for head in range(PER_GROUP):
        x1, x2 = _load_pair(qkv + head * D, line, c1, c2, inside)
        top = _put_codes(
            x1, x2, cos1, sin1, cos2, sin2, query + head * D, at * (PER_GROUP * D), c1, c2, inside, top, q_scale, 0.0, 0.0,
            STORE, FP8_MAX, MANTISSA, BIAS, HARDWARE,
        )  # fmt: skip
    _tell(top, q_scale, amaxes, scale_invs)
    x1, x2 = _load_pair(qkv + PER_GROUP * D, line, c1, c2, inside)
    top = _put_codes(
        x1, x2, cos1, sin1, cos2, sin2, key, narrow, c1, c2, inside, nothing, k_scale, 0.0, 0.0, STORE, FP8_MAX, MANTISSA, BIAS, HARDWARE
    )
    _tell(top, k_scale, None if amaxes is None else amaxes + 1, None if scale_invs is None else scale_invs + 1)
    x1, x2 = _load_pair(qkv + (PER_GROUP + 1) * D, line, c1, c2, inside)
    less1, less2 = nothing, nothing
    if center is not None:
        less1, less2 = _load_pair(center, ((token % batch) * groups + tl.program_id(1)) * D, c1, c2, inside)
    top = _put_codes(
        x1, x2, nothing + 1.0, nothing, nothing + 1.0, nothing, value, narrow, c1, c2, inside, nothing, v_scale, less1, less2,
        STORE, FP8_MAX, MANTISSA, BIAS, HARDWARE,
    )  # fmt: skip
    _tell(top, v_scale, None if amaxes is None else amaxes + 2, None if scale_invs is None else scale_invs + 2)


@triton.jit
def _value(x, unscale, E5M2: tl.constexpr):
    """Return the FP32 value of a loaded number, or of an E5M2 code (the upper byte of an FP16 number) times its scale_inv."""
    if E5M2:
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return x.to(tl.float32) * unscale


@triton.jit
def _load_token(part, token, low, tokens, batch, s_stride, b_stride, c1, c2, channels):
    there = (token >= low) & (token < tokens)
    return _load_pair(part, _line(token, batch, s_stride, b_stride), c1, c2, there[:, None] & channels[None, :])


@triton.jit
def _add_sink(v1, v2, ds, sink, token, tokens, batch, group, head, c1, c2, channels, part, PER_GROUP: tl.constexpr, D: tl.constexpr):
    """Add what the first token contributes: to queries ds times its key, to the first token's own key and value their gradients."""
    b = token % batch
    groups = part // (batch * D)
    is_query = head < PER_GROUP
    change = tl.load(ds + token.to(tl.int64) * (groups * PER_GROUP) + group * PER_GROUP + head, mask=is_query & (token < tokens), other=0.0)
    factor = tl.where(is_query, change, tl.where(token < batch, 1.0, 0.0))[:, None]
    at = tl.maximum(head - (PER_GROUP - 1), 0) * part + (b * groups + group) * D
    a, z = _load_pair(sink, at, c1, c2, (factor != 0) & channels[None, :])
    return v1 + factor * a, v2 + factor * z


@triton.jit
def _rotary_backward_kernel(
    dq, dk, dv, cos, sin, ds, sink, g, g_t, sums, scale, amax, scale_inv, unscale, tokens, batch, N, q_lead, k_lead,
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, groups, table,
    APART: tl.constexpr, PER_GROUP: tl.constexpr, TOGETHER: tl.constexpr, ALIGNED: tl.constexpr, E5M2: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, TILE_M: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    q = tl.arange(0, TILE_M // 4)
    c1, c2, channels = _pairs(D, R, HALF)
    first_quad, column = tl.program_id(0).to(tl.int64) * (TILE_M // 4), tl.program_id(1).to(tl.int64) * D
    quad = tl.program_id(0) * (TILE_M // 4) + q
    group, head = tl.program_id(1) // (PER_GROUP + 2), tl.program_id(1) % (PER_GROUP + 2)
    if APART:
        group, head = tl.program_id(1) // PER_GROUP, tl.program_id(1) % PER_GROUP
        if group >= groups:
            rest = tl.program_id(1) - groups * PER_GROUP
            group, head = rest % groups, PER_GROUP + rest // groups
    part, s_stride, b_stride, lead = dq + (group * PER_GROUP + head).to(tl.int64) * q_h, q_s, q_b, q_lead
    if head == PER_GROUP:
        part, s_stride, b_stride, lead = dk + group.to(tl.int64) * k_h, k_s, k_b, k_lead
    elif head > PER_GROUP:
        part, s_stride, b_stride, lead = dv + group.to(tl.int64) * v_h, v_s, v_b, k_lead
    part -= lead * s_stride  # of the first tokens, which are missing and not loaded
    low = lead * batch
    turns = head <= PER_GROUP
    turning = tl.where(turns, tokens, 0)  # tokens with angles
    x0 = _load_token(part, 4 * quad, low, tokens, batch, s_stride, b_stride, c1, c2, channels)
    x1 = _load_token(part, 4 * quad + 1, low, tokens, batch, s_stride, b_stride, c1, c2, channels)
    x2 = _load_token(part, 4 * quad + 2, low, tokens, batch, s_stride, b_stride, c1, c2, channels)
    x3 = _load_token(part, 4 * quad + 3, low, tokens, batch, s_stride, b_stride, c1, c2, channels)
    pairs = (x0, x1, x2, x3)
    cos1, sin1, cos2, sin2 = _angles(cos, sin, _position(4 * quad, batch, table, APART), 4 * quad < turning, c1, c2, R)
    f, u = 1.0, 1.0
    if scale is not None:
        f = tl.load(scale)
    if unscale is not None:
        u = tl.load(unscale + tl.maximum(head - (PER_GROUP - 1), 0))
    top = tl.zeros((TILE_M // 4, HALF), tl.float32)
    total1, total2 = top, top
    values1, values2 = (), ()
    for k in tl.static_range(4):
        token = 4 * quad + k
        v1, v2 = pairs[k]
        v1, v2 = _value(v1, u, E5M2), _value(v2, u, E5M2)
        if ds is not None:
            of_part = batch * (N // (PER_GROUP + 2))
            v1, v2 = _add_sink(v1, v2, ds, sink, token, tokens, batch, group, head, c1, c2, channels, of_part, PER_GROUP, D)
        if k > 0 and not TOGETHER:
            cos1, sin1, cos2, sin2 = _angles(cos, sin, _position(token, batch, table, APART), token < turning, c1, c2, R)
        v1, v2 = tl.where(turns, v1 * cos1 + v2 * sin2, v1), tl.where(turns, v2 * cos2 - v1 * sin1, v2)
        top = _higher(_higher(top, v1, ALIGNED), v2, ALIGNED)
        total1, total2 = total1 + v1, total2 + v2
        values1 = values1 + (v1,)  # noqa: RUF005
        values2 = values2 + (v2,)  # noqa: RUF005
    if scale is not None or MANTISSA == 0:
        left, origin = (tokens - 4 * first_quad).to(tl.int32), 4 * first_quad * N + column
        row = (4 * q)[:, None] * N
        _put(
            values1, g, g_t, origin, first_quad, column, row + c1[None, :], N, q, c1, tokens, left, channels, f,
            ALIGNED, FP8_MAX, MANTISSA, BIAS, HARDWARE,
        )  # fmt: skip
        _put(
            values2, g, g_t, origin, first_quad, column, row + c2[None, :], N, q, c2, tokens, left, channels, f,
            ALIGNED, FP8_MAX, MANTISSA, BIAS, HARDWARE,
        )  # fmt: skip
        _put_sums(total1, sums, column, c1, N, channels)
        _put_sums(total2, sums, column, c2, N, channels)
    if MANTISSA > 0:
        _tell(top, f, amax, scale_inv)


def parts(M: int) -> int:
    """Return the number of parts in the column sums of a gradient with M rows."""
    return max(1, -(-M // BACKWARD_TILE_M))


def rotary_(qkv, cos, sin, heads, groups, *, apart=False):
    """See the reference twin."""
    d = head_width(qkv, heads, groups)
    (s, b, _), r = qkv.shape, cos.shape[1]
    check_tables(cos, sin, table_rows(s, b, apart), d)
    if r == 0 or s * b == 0:
        return
    _rotary_kernel[-(-s * b // TILE_M), groups](
        qkv, cos.contiguous(), sin.contiguous(), s * b, b, groups, len(cos), APART=apart,
        PER_GROUP=heads // groups, D=d, R=r, HALF=triton.next_power_of_2(r // 2), TILE_M=TILE_M, num_warps=WARPS,
    )  # fmt: skip


def rotary_cast(qkv, cos, sin, heads, groups, scales, amax_slots, dtype, *, scale_inv_slots=None, center=None):
    """See the reference twin."""
    d = head_width(qkv, heads, groups)
    (s, b, _), r, device = qkv.shape, cos.shape[1], qkv.device
    check_tables(cos, sin, (s,), d)
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    query, key, value = (torch.empty((s, b, count, d), dtype=dtype, device=device) for count in (heads, groups, groups))
    codes = [part.view(torch.uint8) for part in (query, key, value)]

    def launch(scales: torch.Tensor | None, amaxes: torch.Tensor | None, scale_invs: torch.Tensor | None) -> None:
        _rotary_cast_kernel[max(1, -(-s * b // TILE_M)), groups](
            qkv, *codes, cos, sin, center, scales, amaxes, scale_invs, s * b, max(1, b), groups,
            PER_GROUP=heads // groups, D=d, R=r, HALF=triton.next_power_of_2(d // 2), TILE_M=TILE_M, STORE=scales is not None,
            num_warps=WARPS, **fp8_constants(dtype, device),
        )  # fmt: skip

    if scales is None:
        amaxes = torch.zeros(3, dtype=torch.float32, device=device)
        launch(None, amaxes, None)
        scales = scale_from_amax(amaxes, of_dtype(dtype).max, None, 1.0)
    scale_invs = torch.zeros(3, dtype=torch.float32, device=device) if scale_inv_slots is None else scale_inv_slots
    launch(scales, amax_slots, scale_invs)
    return query, key, value, scale_invs if scale_inv_slots is None else nothing(torch.float32, device)


def rotary_backward(
    dq, dk, dv, cos, sin, scale, amax_slot, dtype, *,
    colsum=False, scale_inv_slot=None, scale_invs=None, ds=None, sink=None, apart=False,
):  # fmt: skip
    """See the reference twin."""
    outer, b, heads, d = dq.shape
    s = outer if apart else cos.shape[0]
    groups, quantised, device = dk.shape[2], dtype.itemsize == 1, dq.device
    check_tables(cos, sin, table_rows(s, b, apart), d)
    e5m2 = dq.dtype == torch.float8_e5m2
    if e5m2:
        dq, dk, dv = (part.view(torch.uint8) for part in (dq, dk, dv))
    dq, dk, dv = (part if part.stride(3) == 1 else part.contiguous() for part in (dq, dk, dv))
    M, N = s * b, (heads + 2 * groups) * d
    grid = (parts(M), heads + 2 * groups)
    g, g_t = _layouts(M, N, True, quantised, dtype, device)
    partial = _partial_sums(colsum, grid[0], N, device)
    cos, sin, constants = cos.contiguous(), sin.contiguous(), fp8_constants(dtype, device)
    half = triton.next_power_of_2(d // 2)

    def launch(scale: torch.Tensor | None, amax: torch.Tensor | None, scale_inv: torch.Tensor | None) -> None:
        _rotary_backward_kernel[grid](
            dq, dk, dv, cos, sin, ds, sink, g, g_t if quantised else None, partial if colsum else None, scale, amax, scale_inv,
            scale_invs, M, max(1, b), N, s - len(dq), s - len(dk),
            *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], groups, len(cos),
            APART=apart, PER_GROUP=heads // groups, TOGETHER=b % 4 == 0 and not apart, ALIGNED=M % 4 == 0, E5M2=e5m2,
            D=d, R=cos.shape[1], HALF=half, TILE_M=BACKWARD_TILE_M, num_warps=max(1, min(16, half // CHANNELS_A_WARP)), **constants,
        )  # fmt: skip

    return g, g_t, _quantise(launch, scale, amax_slot, scale_inv_slot, dtype, device), partial
