"""AdamW over many tensors with one or both moments in COAT's format: one launch computes their numbers, and one reads and writes each
element once. A tile contains whole groups, so maxima and exponents need no second pass. Twin: `msamp.kernels.reference.coat_adamw`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.store import NEAREST
from msamp.kernels.tables import numbered, rows_of
from msamp.kernels.triton.adamw import (
    _averages,
    _fma,
    _keep,
    _mantissa,
    _numbers,
    _pointers,
    _raise,
    _store_weights,
    _table_rows,
    _within,
    constants_of,
    launch,
)
from msamp.kernels.triton.adamw_scalars import COLUMNS, ROW
from msamp.kernels.triton.pack import HEAD, _payload, _pointer, _value
from msamp.kernels.triton.store import _draws, _fallen, _store_m, _store_v
from msamp.numerics.range_expand import STATE_GROUP, Expanded

GROUP = STATE_GROUP.size
TILE, CHUNK = 2, 32  # groups per iteration and per program
WARPS = 1  # a single warp never waits for another
SHORTEST = tl.constexpr(2.0**-24)  # lower limit of log2(max / min) of a group: the value for two adjacent FP32 numbers


class MomentGroups(NamedTuple):
    """The columns after AdamW's `AdamWRow`: the row length of the weight, and addresses of the moments' maxima and exponents, or 0."""

    length: int
    m_max: int
    m_k: int
    v_max: int
    v_k: int


GROUPS, WIDTH = tl.constexpr(numbered(MomentGroups, COLUMNS)), COLUMNS + len(MomentGroups._fields)


@triton.jit
def _approximate(x, FUNCTION: tl.constexpr, HARDWARE: tl.constexpr):
    """Approximate lg2 (to 2^-22), rcp or sqrt (to 2^-23) of FP32 that is 0, normal or not finite; subnormals count as 0.

    The correctly rounded instructions branch per element, and a warp waits at each branch.
    """
    if HARDWARE:
        y = tl.inline_asm_elementwise(FUNCTION + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    elif FUNCTION == "lg2":
        y = tl.log2(x)
    elif FUNCTION == "rcp":
        y = 1.0 / x
    else:
        y = tl.sqrt(x)
    return y


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _with_sign_of(x, magnitude):
    return (_bits(magnitude) | (_bits(x) & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _contracted(raw, largest, k, MANTISSA: tl.constexpr, SIGNED: tl.constexpr, HARDWARE: tl.constexpr):
    """Dequantize payloads [groups, GROUP]: sign(q) max (|q| / fp_max)^(1 / k)."""
    FP_MAX: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    q = _value(raw, MANTISSA, HARDWARE)
    quotient = tl.abs(q) * (1.0 / FP_MAX)  # exactly 1 if q is FP_MAX
    exponent = _approximate(quotient, "lg2", HARDWARE) * _approximate(k, "rcp", HARDWARE)[:, None]
    magnitude = tl.exp2(exponent) * largest[:, None]
    return _with_sign_of(q, magnitude) if SIGNED else magnitude


@triton.jit
def _expanded(x, no_gradient, log2_beta1, MANTISSA: tl.constexpr, SIGNED: tl.constexpr, HARDWARE: tl.constexpr):
    """Return the payloads of FP32 [groups, GROUP], and each group's maximum and exponent, as `quantize_expanded` does. A short group is
    padded with 0.

    The signed moment is m. Where `no_gradient`, x is beta1 times the former m, and codes that would undo more than half of this
    decay decrease.
    """
    LOG2_MAX: tl.constexpr = 8.807354922057604 if MANTISSA == 3 else 15.807354922057604
    SMALLEST: tl.constexpr = 0.001953125 if MANTISSA == 3 else 0.0000152587890625
    LOG2_RANGE: tl.constexpr = 17.807354922057604 if MANTISSA == 3 else 31.807354922057604
    # The bits of magnitudes have the order of the magnitudes, with NaN above infinity; minus 1, the bits of 0 are above all others.
    bits = _bits(x) & 0x7FFFFFFF if SIGNED else _bits(x)
    top = tl.max(bits, 1)
    low = tl.min(bits - 1, 1) + 1
    usable = (top > 0) & (top < 0x7F800000)
    divisor = tl.where(usable, top, 0x3F800000)
    # Scale the group by a power of two, so that its logarithms are small and therefore precise.
    power = (tl.maximum(254 - (divisor >> 23).to(tl.int32), 1) << 23).to(tl.float32, bitcast=True)
    log2_max = _approximate(divisor.to(tl.float32, bitcast=True) * power, "lg2", HARDWARE)
    span = log2_max - _approximate(low.to(tl.float32, bitcast=True) * power, "lg2", HARDWARE)
    span = tl.minimum(tl.maximum(span, SHORTEST), 126.0)
    k = tl.where(usable & (low < top), _approximate(span, "rcp", HARDWARE) * LOG2_RANGE, 1.0)
    first = LOG2_MAX - k * log2_max
    grown = tl.exp2(_fma(_approximate(tl.abs(x) * power[:, None], "lg2", HARDWARE), k[:, None], first[:, None], HARDWARE))
    # With a large k, an error of the logarithm must not cause underflow.
    stored = tl.where(x != 0, tl.maximum(grown, SMALLEST), grown)
    if SIGNED:
        payload = _payload(_with_sign_of(x, stored), MANTISSA, HARDWARE)
        half_decayed = tl.where(no_gradient, grown * tl.exp2(-0.5 * k * log2_beta1)[:, None], float("inf"))
        payload = _payload(_fallen(_value(payload, MANTISSA, HARDWARE), half_decayed, MANTISSA), MANTISSA, HARDWARE)
    else:
        payload = _payload(stored, MANTISSA, HARDWARE)
    return payload, tl.where(top < 0x7F800000, top.to(tl.float32, bitcast=True), float("nan")), k


@triton.jit
def _load_moment(
    pointer, at, inside, factor, largest, exponents, groups, known,
    MANTISSA: tl.constexpr, COAT: tl.constexpr, SIGNED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    if COAT:
        raw = tl.load(pointer + at, mask=inside, other=0)
        of_each = tl.load(largest + groups, mask=known, other=0.0)
        value = _contracted(raw, of_each, tl.load(exponents + groups, mask=known, other=1.0), MANTISSA, SIGNED, HARDWARE)
    else:
        value = _value(tl.load(pointer + at, mask=inside, other=0), MANTISSA, HARDWARE)
    return value * factor


@triton.jit
def _store_moment(
    pointer, at, inside, x, before, g, scale, floor, log2_beta1, reached, largest, exponents, groups, known,
    MANTISSA: tl.constexpr, COAT: tl.constexpr, SIGNED: tl.constexpr, HARDWARE: tl.constexpr, words, SR: tl.constexpr,
):  # fmt: skip
    """Store a moment; for a format with a scale, return the largest magnitudes `reached` so far. The signed moment is m."""
    if COAT:
        payload, of_each, k = _expanded(x, g == 0, log2_beta1, MANTISSA, SIGNED, HARDWARE)
        tl.store(pointer + at, payload, mask=inside)
        tl.store(largest + groups, of_each, mask=known)
        tl.store(exponents + groups, k, mask=known)
    else:
        if SIGNED:
            stored = _store_m(pointer, at, inside, x, before, g, scale, MANTISSA, HARDWARE, words, SR)
        else:
            stored = _store_v(pointer, at, inside, x, scale, floor, MANTISSA, HARDWARE, words, SR)
        reached = _raise(reached, tl.where(inside, stored, 0.0))
    return reached


@triton.jit(do_not_specialize=["skipped", "pieces"])
def _coat_adamw_kernel(
    table, owners, skipped, scalars, kept, pieces, usable,
    G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, P: tl.constexpr, W: tl.constexpr, KEEP_P: tl.constexpr,
    M_COAT: tl.constexpr, V_COAT: tl.constexpr, DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr, HARDWARE: tl.constexpr,
    SR_M: tl.constexpr, SR_V: tl.constexpr, SR_P: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, SCALARS: tl.constexpr,
):  # fmt: skip
    if tl.load(usable) == 0:
        return
    row = table + tl.load(owners + tl.program_id(0)) * COLUMNS
    own = scalars + tl.load(owners + tl.program_id(0)) * SCALARS
    # Load all numbers before the loop: the compiler does not know that the stores in it cannot change them.
    (
        g_factor, m_old, m_scale, m_new, v_factor, v_scale, v_new, v_floor, p_factor, p_scale, p_new, w_factor, weight_decay, weight, w2,
        _, eps, step_size, correction_inverse, bound, turn,
    ) = _numbers(own)  # fmt: skip
    log2_beta1 = _approximate(tl.where(weight > 0, 1.0 - weight, -weight), "lg2", HARDWARE)
    # `first` is this program's first group.
    first = (skipped + tl.program_id(0) - tl.load(row + HEAD.value.first)) * CHUNK
    left = tl.minimum((tl.load(row + HEAD.value.numel) + GROUP - 1) // GROUP - first, CHUNK).to(tl.int32)
    if FULL:
        start = first * GROUP
    else:
        # A row of the weight has `in_row` groups; the first one is in column `column` of its row.
        length = tl.load(row + GROUPS.value.length)
        in_row = (length + GROUP - 1) // GROUP
        column = (first % in_row).to(tl.int32)
        start = first // in_row * length
        length = length.to(tl.int32)
        in_row = in_row.to(tl.int32)
        if ALIGNED:
            length = tl.multiple_of(length, 16)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    key = tl.load(row + ROW.value.key)
    index = tl.load(row + ROW.value.offset) + start
    g_pointer, m_pointer, v_pointer, p_pointer, w_pointer = _pointers(row, start, G, M, V, P, W, ALIGNED)
    m_largest = _pointer(tl.load(row + GROUPS.value.m_max), 23, False) + first
    m_exponents = _pointer(tl.load(row + GROUPS.value.m_k), 23, False) + first
    v_largest = _pointer(tl.load(row + GROUPS.value.v_max), 23, False) + first
    v_exponents = _pointer(tl.load(row + GROUPS.value.v_k), 23, False) + first
    m_reached = tl.zeros((TILE, GROUP), tl.float32)
    v_reached = tl.zeros((TILE, GROUP), tl.float32)
    p_reached = tl.zeros((TILE, GROUP), tl.float32)
    for tile in range(0, left, TILE):
        groups = tile + tl.arange(0, TILE)
        known = groups < left
        if FULL:  # contiguous memory
            at = (groups * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
            inside = at < left * GROUP
        else:
            in_columns = ((column + groups) % in_row * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
            at = ((column + groups) // in_row * length)[:, None] + in_columns
            inside = (in_columns < length) & known[:, None]
        g = _value(tl.load(g_pointer + at, mask=inside, other=0), G, HARDWARE) * g_factor
        before = _load_moment(m_pointer, at, inside, m_old, m_largest, m_exponents, groups, known, M, M_COAT, True, HARDWARE)
        v = _load_moment(v_pointer, at, inside, v_factor, v_largest, v_exponents, groups, known, V, V_COAT, False, HARDWARE)
        p = _value(tl.load(p_pointer + at, mask=inside, other=0), P, HARDWARE) * p_factor
        m, v, g = _averages(g, before, v, p, weight_decay, weight, w2, DECOUPLED, HARDWARE)
        # The moments have a precision of about 2^-20; the error of the approximations is smaller.
        d = _fma(_approximate(v, "sqrt", HARDWARE), correction_inverse, eps, HARDWARE)
        used = _within(m, d * bound)
        p = _fma(step_size, used * _approximate(d, "rcp", HARDWARE), p, HARDWARE)
        of_m, of_v, of_p = _draws(key, index, at, turn, WIDE, WHOLE)
        m_reached = _store_moment(
            m_pointer, at, inside, m, before, g, m_scale, 0.0, log2_beta1, m_reached, m_largest, m_exponents, groups, known,
            M, M_COAT, True, HARDWARE, of_m, SR_M,
        )  # fmt: skip
        v_reached = _store_moment(
            v_pointer, at, inside, v, v, g, v_scale, v_floor, log2_beta1, v_reached, v_largest, v_exponents, groups, known,
            V, V_COAT, False, HARDWARE, of_v, SR_V,
        )  # fmt: skip
        p_reached = _store_weights(p_pointer, w_pointer, at, inside, p, p_scale, w_factor, p_reached, P, W, HARDWARE, of_p, SR_P)
    kept += tl.load(row + ROW.value.place)
    if not M_COAT and M != 23 and M != 7:
        _keep(kept, tl.ravel(m_reached), m_new)
    if not V_COAT and V != 23 and V != 7:
        _keep(kept + pieces, tl.ravel(v_reached), v_new)
    if KEEP_P:
        _keep(kept + 2 * pieces, tl.ravel(p_reached), p_new)


def _beside(states: Sequence[torch.Tensor | Expanded]) -> tuple[list[int], list[int]]:
    """Return the addresses of maxima and exponents, 0 if a state has none."""
    parts = [(state.max.data_ptr(), state.k.data_ptr()) if isinstance(state, Expanded) else (0, 0) for state in states]
    return [of_max for of_max, _ in parts], [of_k for _, of_k in parts]


def _size(shape: torch.Size) -> int:
    """Return the number of elements with all groups padded; minus 1 if the row length does not allow 16-byte accesses."""
    *rows, length = shape or (1,)
    size = torch.Size(rows).numel() * -(-length // GROUP) * GROUP
    return size - (size > 0 and length % 16 != 0)


def coat_adamw(tables, batch, hyper, amaxes, kept, coefficient, usable, *, decoupled, rounding=NEAREST):
    """See the reference twin; `hyper` is FP64 [8], from `hyper_numbers`."""
    m_coat, v_coat = (isinstance(states[0], Expanded) for states in (batch.ms, batch.vs))
    moments = ([x.payload if isinstance(x, Expanded) else x for x in states] for states in (batch.ms, batch.vs))
    columns = (batch.grads, *moments, batch.masters, batch.weights)
    (m_max, m_k), (v_max, v_k) = _beside(batch.ms), _beside(batch.vs)
    groups = rows_of(MomentGroups, length=[(g.shape or (1,))[-1] for g in batch.grads], m_max=m_max, m_k=m_k, v_max=v_max, v_k=v_k)
    rows = [(*row, *of) for row, of in zip(_table_rows(batch, columns, [_size(g.shape) for g in batch.grads]), groups, strict=True)]
    formats = dict(zip("GMVPW", map(_mantissa, columns), strict=True))
    drawn = constants_of(batch, 23 if m_coat else formats["M"], 23 if v_coat else formats["V"], formats["P"], rounding)
    full = all(g.shape and g.shape[-1] % GROUP == 0 for g in batch.grads)
    launch(
        _coat_adamw_kernel, tables, ("coat_adamw", batch.indices[0], m_coat, v_coat, *formats.values()), rows, CHUNK * GROUP, batch,
        (hyper, amaxes, kept, coefficient, usable), formats, "M" * m_coat + "V" * v_coat, columns=WIDTH, decoupled=decoupled,
        M_COAT=m_coat, V_COAT=v_coat, FULL=full, GROUP=GROUP, TILE=TILE, CHUNK=CHUNK, num_warps=WARPS, **drawn,
    )  # fmt: skip
