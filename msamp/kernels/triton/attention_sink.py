"""The first token of FP8 attention and the constant taken out of the values. Twin: `msamp.kernels.reference.attention_sink`.

A program of `sink_merge` and `sink_backward` processes some tokens of one head of one sequence, a few at a time; programs of one after the
other are of neighbouring heads, whose memory is contiguous. Means over the tokens are
sums of parts in a fixed order: a program sums some tokens of one group, and another the parts.
"""

import torch
import triton
import triton.language as tl

from msamp.kernels.triton.cast import _bytes, _rounded, fp8_constants
from msamp.kernels.triton.cast_transpose import _code, _higher, _quantise, _tell, nothing
from msamp.kernels.triton.pack import _value
from msamp.kernels.triton.scale_from_amax import _inverse

TILE_M, TOKENS, WARPS = 16, 128, 4  # tokens at a time, and per program
STAGES = tl.constexpr(3)  # tiles whose loads are under way: 49 us instead of 66 for the backward of 16 heads x 4 x 2,048 tokens
SUM_TOKENS = 256


@triton.jit
def _sum_kernel(
    value, sums, tokens, skip, groups, v_s, v_b, v_g,
    CODES: tl.constexpr, HARDWARE: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr, TILE_M: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    c, row = tl.arange(0, CHANNELS), tl.program_id(1)
    values = value + (row // groups).to(tl.int64) * v_b + (row % groups).to(tl.int64) * v_g
    total = tl.zeros((TILE_M, CHANNELS), tl.float32)
    for start in tl.static_range(0, TOKENS, TILE_M):
        token = tl.program_id(0) * TOKENS + start + tl.arange(0, TILE_M)
        inside = ((token >= skip) & (token < tokens))[:, None] & (c < D)[None, :]
        loaded = tl.load(values + token.to(tl.int64)[:, None] * v_s + c[None, :], mask=inside, other=0)
        total += _value(loaded, 3 if CODES else 10, HARDWARE)
    at = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + row) * D
    tl.store(sums + at + c, tl.sum(total, 0), mask=c < D)


@triton.jit
def _mean(sums, parts, count, D: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr):
    """Return the sum of a row of `sums` [parts, rows, D] over the parts, divided by `count`."""
    c, row, rows = tl.arange(0, CHANNELS), tl.program_id(0), tl.num_programs(0).to(tl.int64)
    total = tl.zeros((PARTS, CHANNELS), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        total += tl.load(sums + (part[:, None] * rows + row) * D + c[None, :], mask=(part < parts)[:, None] & (c < D)[None, :], other=0.0)
    return tl.sum(total, 0) / tl.maximum(count, 1).to(tl.float32)


@triton.jit
def _sink_kernel(
    key, value, cos, sin, sink, sums, parts, count, groups, k_b, k_g, v_b, v_g,
    D: tl.constexpr, R: tl.constexpr, HARDWARE: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    b, g, c = tl.program_id(0) // groups, tl.program_id(0) % groups, tl.arange(0, CHANNELS)
    inside, turned, part = c < D, c < R, tl.num_programs(0).to(tl.int64) * D
    at = sink + tl.program_id(0).to(tl.int64) * D + c
    keys, values = key + b.to(tl.int64) * k_b + g * k_g, value + b.to(tl.int64) * v_b + g * v_g
    other, sign = tl.where(c < R // 2, c + R // 2, c - R // 2), tl.where(c < R // 2, -1.0, 1.0)
    x, y = tl.load(keys + c, mask=inside, other=0.0).to(tl.float32), tl.load(keys + other, mask=turned, other=0.0).to(tl.float32)
    cosine, sine = tl.load(cos + c, mask=turned, other=1.0), tl.load(sin + c, mask=turned, other=0.0)
    tl.store(at, _rounded(x * cosine + sign * (y * sine), key.dtype.element_ty, HARDWARE).to(tl.float32), mask=inside)
    tl.store(at + part, tl.load(values + c, mask=inside, other=0.0).to(tl.float32), mask=inside)
    tl.store(at + 2 * part, _mean(sums, parts, count, D, CHANNELS, PARTS), mask=inside)


@triton.jit
def _center_kernel(sink, sums, scale_inv, parts, count, D: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr):
    c = tl.arange(0, CHANNELS)
    at = sink + (2 * tl.num_programs(0).to(tl.int64) + tl.program_id(0)) * D + c
    mean = _mean(sums, parts, count, D, CHANNELS, PARTS) * tl.load(scale_inv)
    tl.store(at, tl.load(at, mask=c < D, other=0.0) - mean, mask=c < D)


@triton.jit
def _first_token(sink, scale_invs, softmax_scale, batch, groups, PER_GROUP: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr):
    """Return, for the program's sequence and head: the sequence, the head, the channels and their mask; the first token's key times the
    factor of the scores, its value, and the center, [1, CHANNELS]."""
    c = tl.arange(0, CHANNELS)
    b, head = tl.program_id(0) // (groups * PER_GROUP), tl.program_id(0) % (groups * PER_GROUP)
    at, part = sink + (b * groups + head // PER_GROUP).to(tl.int64) * D + c, batch * groups * D
    key = tl.load(at, mask=c < D, other=0.0)[None, :] * (tl.load(scale_invs) * softmax_scale)
    first, center = tl.load(at + part, mask=c < D, other=0.0), tl.load(at + 2 * part, mask=c < D, other=0.0)
    return b, head, c, (c < D)[None, :], key, first[None, :], center[None, :]


@triton.jit
def _merged(
    query, o, lse, scale_invs, start, tokens, skip, batch, groups, b, head, c, channels, key, first, center,
    PER_GROUP: tl.constexpr, D: tl.constexpr, TILE_M: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Return, for TILE_M tokens from `start` on: the first token's weights [TILE_M, 1]; the kernels' output without the center; the output;
    the queries' codes; the tokens' rows in [s, b, heads], and masks of all tokens and of those in `o`."""
    token = start + tl.arange(0, TILE_M)
    row = (token.to(tl.int64) * batch + b) * (groups * PER_GROUP) + head
    at, inside = row[:, None] * D + c[None, :], (token < tokens)[:, None] & channels
    late = (token >= skip) & (token < tokens)
    kept = late[:, None] & channels
    codes = _value(tl.load(query + at, mask=inside, other=0), 3, HARDWARE)
    rest = _value(tl.load(o + (at - skip * batch * groups * PER_GROUP * D), mask=kept, other=0), 3, HARDWARE) * tl.load(scale_invs + 1)
    before = tl.load(lse + tl.program_id(0).to(tl.int64) * (tokens - skip) + (token - skip), mask=late, other=float("-inf"))
    w = (1 / (1 + tl.exp(before - tl.sum(codes * key, 1))))[:, None]
    return w, rest, (1 - w) * (rest + center) + w * first, codes, row, inside, kept, token


@triton.jit
def _merge_kernel(
    query, o, lse, sink, scale_invs, softmax_scale, y, scale, amax, scale_inv, tokens, skip, batch, groups,
    PER_GROUP: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr, TILE_M: tl.constexpr, TOKENS: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    b, head, c, channels, key, first, center = _first_token(sink, scale_invs, softmax_scale, batch, groups, PER_GROUP, D, CHANNELS)
    f = 1.0
    if scale is not None:
        f = tl.load(scale)
    top = tl.zeros((TILE_M, CHANNELS), tl.float32)
    for start in tl.range(tl.program_id(1) * TOKENS, tl.program_id(1) * TOKENS + TOKENS, TILE_M, num_stages=STAGES):
        _, _, merged, _, row, inside, _, _ = _merged(
            query, o, lse, scale_invs, start, tokens, skip, batch, groups, b, head, c, channels, key, first, center,
            PER_GROUP, D, TILE_M, HARDWARE,
        )  # fmt: skip
        top = _higher(top, tl.where(inside, merged, 0.0))
        at = row[:, None] * D + c[None, :]
        if MANTISSA == 0:
            tl.store(y + at, _rounded(merged, y.dtype.element_ty, HARDWARE), mask=inside)
        elif scale is not None:
            tl.store(y + at, _code(merged * f, FP8_MAX, MANTISSA, BIAS, HARDWARE), mask=inside)
    if MANTISSA > 0:
        _tell(top, f, amax, scale_inv)


@triton.jit
def _backward_kernel(
    grad_o, query, o, lse, sink, scale_invs, softmax_scale, value_scale_inv, output_scale_inv,
    y, centered, output, ds, sums, scale, amax, scale_inv, tokens, skip, batch, groups,
    PER_GROUP: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr, TILE_M: tl.constexpr, TOKENS: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    b, head, c, channels, key, first, center = _first_token(sink, scale_invs, softmax_scale, batch, groups, PER_GROUP, D, CHANNELS)
    f, of_values, of_output = 1.0, _inverse(tl.load(value_scale_inv)), 1.0
    if scale is not None:
        f = tl.load(scale)
    if output_scale_inv is not None:
        of_output = _inverse(tl.load(output_scale_inv))
    top = tl.zeros((TILE_M, CHANNELS), tl.float32)
    of_key, of_value = top, top
    for start in tl.range(tl.program_id(1) * TOKENS, tl.program_id(1) * TOKENS + TOKENS, TILE_M, num_stages=STAGES):
        w, rest, merged, codes, row, inside, kept, token = _merged(
            query, o, lse, scale_invs, start, tokens, skip, batch, groups, b, head, c, channels, key, first, center,
            PER_GROUP, D, TILE_M, HARDWARE,
        )  # fmt: skip
        at = row[:, None] * D + c[None, :]
        shifted = at - skip * batch * groups * PER_GROUP * D
        grad = tl.load(grad_o + at, mask=inside, other=0.0).to(tl.float32)
        given = (1 - w) * grad
        top = _higher(top, tl.where(kept, given, 0.0))
        if MANTISSA == 0:
            tl.store(y + shifted, _rounded(given, y.dtype.element_ty, HARDWARE), mask=kept)
        elif scale is not None:
            tl.store(y + shifted, _code(given * f, FP8_MAX, MANTISSA, BIAS, HARDWARE), mask=kept)
            tl.store(centered + shifted, _code((merged - center) * of_values, 448.0, 3, 7, HARDWARE), mask=kept)
            if output_scale_inv is not None:
                tl.store(output + at, _code(merged * of_output, 448.0, 3, 7, HARDWARE), mask=inside)
            change = tl.sum(grad * (first - center - rest), 1)[:, None] * (w * (1 - w)) * softmax_scale
            tl.store(ds + row, tl.sum(change, 1), mask=token < tokens)
            of_key, of_value = of_key + change * codes, of_value + w * grad
    if scale is not None:
        n = tl.num_programs(0).to(tl.int64) * D
        place = sums + 2 * n * tl.program_id(1) + tl.program_id(0).to(tl.int64) * D + c
        tl.store(place, tl.sum(of_key, 0) * tl.load(scale_invs), mask=c < D)
        tl.store(place + n, tl.sum(of_value, 0), mask=c < D)
    if MANTISSA > 0:
        _tell(top, f, amax, scale_inv)


def _sums(value: torch.Tensor, skip: int) -> torch.Tensor:
    """Return the sums over parts of the tokens, FP32 [parts, b, groups, d]."""
    (s, b, groups, d), codes = value.shape, value.element_size() == 1
    sums = torch.empty((max(1, -(-s // SUM_TOKENS)), b, groups, d), dtype=torch.float32, device=value.device)
    _sum_kernel[len(sums), b * groups](
        value.view(torch.uint8) if codes else value, sums, s, skip, groups, *value.stride()[:3], CODES=codes, HARDWARE=value.is_cuda, D=d,
        CHANNELS=triton.next_power_of_2(d), TILE_M=64, TOKENS=SUM_TOKENS, num_warps=WARPS,
    )  # fmt: skip
    return sums


def attention_sink(key, value, cos, sin, skip):
    """See the reference twin."""
    s, b, groups, d = key.shape
    key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (key, value))
    sink, sums = torch.empty((3, b, groups, d), dtype=torch.float32, device=key.device), _sums(value, skip)
    _sink_kernel[b * groups,](
        key, value, cos.contiguous(), sin.contiguous(), sink, sums, len(sums), s - skip, groups, *key.stride()[1:3], *value.stride()[1:3],
        D=d, R=cos.shape[1], HARDWARE=key.is_cuda, CHANNELS=triton.next_power_of_2(d), PARTS=16, num_warps=WARPS,
    )  # fmt: skip
    return sink


def sink_center_(sink, value, scale_inv, skip):
    """See the reference twin."""
    (s, b, groups, d), sums = value.shape, _sums(value, skip)
    _center_kernel[b * groups,](
        sink, sums, scale_inv, len(sums), s - skip, D=d, CHANNELS=triton.next_power_of_2(d), PARTS=16, num_warps=WARPS
    )


def parts(s: int) -> int:
    """Return the number of parts of `sink_backward`'s sums for s tokens."""
    return max(1, -(-s // TOKENS))


def sink_merge(query, o, lse, sink, scale_invs, softmax_scale, scale, amax_slot, dtype, *, scale_inv_slot=None):
    """See the reference twin."""
    (s, b, heads, d), groups = query.shape, sink.shape[2]
    y = torch.empty(query.shape, dtype=dtype, device=query.device)
    codes, constants = _bytes(y), fp8_constants(dtype, query.device)

    def launch(scale: torch.Tensor | None, amax: torch.Tensor | None, scale_inv: torch.Tensor | None) -> None:
        _merge_kernel[b * heads, parts(s)](
            query.view(torch.uint8), o.view(torch.uint8), lse, sink, scale_invs, softmax_scale, codes, scale, amax, scale_inv,
            s, s - o.shape[0], b, groups, PER_GROUP=heads // groups, D=d, CHANNELS=triton.next_power_of_2(d), TILE_M=TILE_M, TOKENS=TOKENS,
            num_warps=WARPS, **constants,
        )  # fmt: skip

    return y, _quantise(launch, scale, amax_slot, scale_inv_slot, dtype, query.device)


def sink_backward(
    grad_o, query, o, lse, sink, scale_invs, softmax_scale, scale, amax_slot, dtype, value_scale_inv, output_scale_inv,
    *, scale_inv_slot=None,
):  # fmt: skip
    """See the reference twin."""
    (s, b, heads, d), groups, device = query.shape, sink.shape[2], query.device
    given, centered = torch.empty(o.shape, dtype=dtype, device=device), torch.empty_like(o)
    output = nothing(query.dtype, device) if output_scale_inv is None else torch.empty_like(query)
    ds = torch.empty((s, b, heads), dtype=torch.float32, device=device)
    sums = torch.empty((parts(s), 2 * b * heads * d), dtype=torch.float32, device=device)
    written = [_bytes(x) for x in (given, centered, output)]
    constants = fp8_constants(dtype, device)

    def launch(scale: torch.Tensor | None, amax: torch.Tensor | None, scale_inv: torch.Tensor | None) -> None:
        _backward_kernel[b * heads, parts(s)](
            grad_o, query.view(torch.uint8), o.view(torch.uint8), lse, sink, scale_invs, softmax_scale, value_scale_inv, output_scale_inv,
            *written, ds, sums, scale, amax, scale_inv, s, s - o.shape[0], b, groups,
            PER_GROUP=heads // groups, D=d, CHANNELS=triton.next_power_of_2(d), TILE_M=TILE_M, TOKENS=TOKENS, num_warps=WARPS, **constants,
        )  # fmt: skip

    scale_inv = _quantise(launch, scale, amax_slot, scale_inv_slot, dtype, device)
    return given, centered, output, ds, scale_inv, sums
