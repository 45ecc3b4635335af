"""AdamW over many tensors with moments, one or both, of COAT's format: a launch for their numbers, and one that reads and writes each
element once. A tile holds whole groups, so that their maxima and exponents need no second pass. Twin: `msamp.kernels.reference.coat_adamw`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.adamw import Batch
from msamp.kernels.tables import Tables, numbered, rows_of
from msamp.kernels.triton.adamw import (
    COLUMNS,
    ROW,
    SCALARS,
    _adam,
    _inverse,
    _keep,
    _mantissa,
    _numbers,
    _pointers,
    _quotient,
    _raise,
    _scalars_kernel,
    _store,
    _store_weights,
    _table_rows,
)
from msamp.kernels.triton.pack import HEAD, _payload, _pointer, _value
from msamp.numerics.range_expand import STATE_GROUP, Expanded
from msamp.numerics.tensor import ScalingTensor

GROUP = STATE_GROUP.size
TILE, CHUNK = 8, 64  # groups a program works on at a time, and in all
WARPS = 4
TINY = tl.constexpr(2.0**-126)


class Groups(NamedTuple):
    """The columns after AdamW's `Row`: the length of a row of the weight, and addresses of the moments' maxima and exponents, or 0."""

    length: int
    m_max: int
    m_k: int
    v_max: int
    v_k: int


GROUPS, WIDTH = tl.constexpr(numbered(Groups, COLUMNS)), COLUMNS + len(Groups._fields)


@triton.jit
def _log2(x, HARDWARE: tl.constexpr):
    """Of 0 or normal numbers, to 2^-22: the error is as large as one of a last place of the argument."""
    if HARDWARE:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def _contracted(raw, largest, k, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """Values of payloads [groups, GROUP]: sign(q) max (|q| / fp_max)^(1 / k)."""
    FP_MAX: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    q = _value(raw, MANTISSA, HARDWARE)
    quotient = tl.abs(q) * (1.0 / FP_MAX)  # 1 where q is FP_MAX
    magnitude = tl.exp2(_log2(quotient, HARDWARE) * _inverse(k)[:, None]) * largest[:, None]
    return tl.where(q.to(tl.int32, bitcast=True) < 0, -magnitude, magnitude)


@triton.jit
def _expanded(x, inside, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """Payloads of FP32 [groups, GROUP], and each group's maximum and exponent: `quantize_expanded`."""
    FP_MAX: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    SMALLEST: tl.constexpr = 0.001953125 if MANTISSA == 3 else 0.0000152587890625
    LOG2_RANGE: tl.constexpr = 17.807354922057604 if MANTISSA == 3 else 31.807354922057604
    # Bits of magnitudes are in the order of the magnitudes, and those of NaN above infinity.
    magnitude = tl.where(inside, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    top = tl.max(magnitude, 1)
    low = tl.min(tl.where(magnitude > 0, magnitude, 0x7F800000), 1).to(tl.float32, bitcast=True)
    usable = (top > 0) & (top < 0x7F800000)
    divisor = tl.where(usable, top, 0x3F800000).to(tl.float32, bitcast=True)
    lowest = tl.where(usable, tl.maximum(tl.div_rn(low, divisor), TINY), 1.0)
    narrow = tl.where(lowest < 1.0, lowest, 0.5)
    k = tl.where(lowest < 1.0, tl.div_rn(narrow * 0.0 + LOG2_RANGE, -tl.log2(narrow)), 1.0)
    # A power of two brings the divisor where its inverse is a normal number too.
    power = (tl.maximum(254 - (divisor.to(tl.int32, bitcast=True) >> 23), 1) << 23).to(tl.float32, bitcast=True)
    each = divisor * power
    quotient = _quotient(tl.abs(x) * power[:, None], each[:, None], _inverse(each)[:, None], HARDWARE)
    grown = tl.exp2(_log2(tl.maximum(quotient, TINY), HARDWARE) * k[:, None]) * FP_MAX
    # Where k is large, an error of the logarithm must not cause underflow.
    grown = tl.where(magnitude > 0, tl.maximum(grown, SMALLEST), 0.0)
    payload = _payload(tl.where(x.to(tl.int32, bitcast=True) < 0, -grown, grown), MANTISSA, HARDWARE)
    return payload, tl.where(top < 0x7F800000, top.to(tl.float32, bitcast=True), float("nan")), k


@triton.jit
def _load_moment(
    pointer, at, inside, old, largest, exponents, groups, known, MANTISSA: tl.constexpr, COAT: tl.constexpr, HARDWARE: tl.constexpr
):
    raw = tl.load(pointer + at, mask=inside, other=0)
    if COAT:
        of_each = tl.load(largest + groups, mask=known, other=0.0)
        value = _contracted(raw, of_each, tl.load(exponents + groups, mask=known, other=1.0), MANTISSA, HARDWARE)
    else:
        value = _value(raw, MANTISSA, HARDWARE) * old
    return value


@triton.jit
def _store_moment(
    pointer, at, inside, x, scale, reached, largest, exponents, groups, known,
    MANTISSA: tl.constexpr, COAT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Store; returns the largest magnitudes `reached` so far, for a format with a scale."""
    if COAT:
        payload, of_each, k = _expanded(x, inside, MANTISSA, HARDWARE)
        tl.store(pointer + at, payload, mask=inside)
        tl.store(largest + groups, of_each, mask=known)
        tl.store(exponents + groups, k, mask=known)
    else:
        reached = _raise(reached, tl.where(inside, _store(pointer, at, inside, x, scale, MANTISSA, HARDWARE), 0.0))
    return reached


@triton.jit(do_not_specialize=["skipped", "pieces"])
def _coat_adamw_kernel(
    table, owners, skipped, scalars, kept, pieces, usable,
    G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, P: tl.constexpr, W: tl.constexpr, KEEP_P: tl.constexpr,
    M_COAT: tl.constexpr, V_COAT: tl.constexpr, DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, HARDWARE: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, SCALARS: tl.constexpr,
):  # fmt: skip
    if tl.load(usable) == 0:
        return
    row = table + tl.load(owners + tl.program_id(0)) * COLUMNS
    own = scalars + tl.load(owners + tl.program_id(0)) * SCALARS
    # All numbers come before the loop: the compiler cannot tell that its stores leave them alone.
    (
        g_old, clip, m_old, m_scale, m_new, v_old, v_scale, v_new, p_old, p_scale, p_new, w_scale, weight_decay, remaining, weight, beta2,
        w2, correction, eps, step_size, correction_inverse,
    ) = _numbers(own)  # fmt: skip
    # A row of the weight has `in_row` groups; `first` of all groups is this program's first, in column `column` of its row.
    length = tl.load(row + GROUPS.value.length)
    in_row = (length + GROUP - 1) // GROUP
    first = (skipped + tl.program_id(0) - tl.load(row + HEAD.value.first)) * CHUNK
    left = tl.minimum((tl.load(row + HEAD.value.numel) + GROUP - 1) // GROUP - first, CHUNK).to(tl.int32)
    column = (first % in_row).to(tl.int32)
    start = first // in_row * length
    length = length.to(tl.int32)
    in_row = in_row.to(tl.int32)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        length = tl.multiple_of(length, 16)
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
        in_columns = ((column + groups) % in_row * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
        at = ((column + groups) // in_row * length)[:, None] + in_columns
        inside = (in_columns < length) & known[:, None]
        g = _value(tl.load(g_pointer + at, mask=inside, other=0), G, HARDWARE) * g_old * clip
        m = _load_moment(m_pointer, at, inside, m_old, m_largest, m_exponents, groups, known, M, M_COAT, HARDWARE)
        v = _load_moment(v_pointer, at, inside, v_old, v_largest, v_exponents, groups, known, V, V_COAT, HARDWARE)
        p = _value(tl.load(p_pointer + at, mask=inside, other=0), P, HARDWARE) * p_old
        m, v, p = _adam(
            g, m, v, p, weight_decay, remaining, weight, beta2, w2, correction, correction_inverse, eps, step_size, DECOUPLED, HARDWARE
        )  # fmt: skip
        m_reached = _store_moment(
            m_pointer, at, inside, m, m_scale, m_reached, m_largest, m_exponents, groups, known, M, M_COAT, HARDWARE
        )  # fmt: skip
        v_reached = _store_moment(
            v_pointer, at, inside, v, v_scale, v_reached, v_largest, v_exponents, groups, known, V, V_COAT, HARDWARE
        )  # fmt: skip
        p_reached = _store_weights(p_pointer, w_pointer, at, inside, p, p_scale, p_new, w_scale, p_reached, P, W, HARDWARE)
    kept += tl.load(row + ROW.value.place)
    if not M_COAT and M != 23 and M != 7:
        _keep(kept, tl.ravel(m_reached), m_new)
    if not V_COAT and V != 23 and V != 7:
        _keep(kept + pieces, tl.ravel(v_reached), v_new)
    if KEEP_P:
        _keep(kept + 2 * pieces, tl.ravel(p_reached), p_new)


def _plain(states: list[torch.Tensor | Expanded]) -> list[torch.Tensor]:
    return [state.payload if isinstance(state, Expanded) else state for state in states]


def _beside(states: Sequence[torch.Tensor | Expanded]) -> tuple[list[int], list[int]]:
    """Addresses of maxima and exponents, 0 where a state has none."""
    parts = [(state.max.data_ptr(), state.k.data_ptr()) if isinstance(state, Expanded) else (0, 0) for state in states]
    return [of_max for of_max, _ in parts], [of_k for _, of_k in parts]


def _size(shape: torch.Size) -> int:
    """Elements of all groups if none were short; one less where the length of a row does not let programs use 16-byte accesses."""
    *rows, length = shape or (1,)
    size = torch.Size(rows).numel() * -(-length // GROUP) * GROUP
    return size - (size > 0 and length % 16 != 0)


def coat_adamw(
    tables: Tables,
    batch: Batch,
    hyper: torch.Tensor,
    amaxes: torch.Tensor,
    kept: torch.Tensor,
    coefficient: torch.Tensor | None,
    usable: torch.Tensor,
    *,
    decoupled: bool,
) -> None:
    """See the reference twin; `hyper`: FP64 [7], the logarithms of both betas after a `Hyper`."""
    m_coat, v_coat = (isinstance(states[0], Expanded) for states in (batch.ms, batch.vs))
    columns = (batch.grads, _plain(batch.ms), _plain(batch.vs), batch.masters, batch.weights)
    (m_max, m_k), (v_max, v_k) = _beside(batch.ms), _beside(batch.vs)
    groups = rows_of(Groups, length=[(g.shape or (1,))[-1] for g in batch.grads], m_max=m_max, m_k=m_k, v_max=v_max, v_k=v_k)
    rows = [(*row, *of) for row, of in zip(_table_rows(batch, columns, [_size(g.shape) for g in batch.grads]), groups, strict=True)]
    formats = dict(zip("GMVPW", map(_mantissa, columns), strict=True))
    key = ("coat_adamw", batch.indices[0], m_coat, v_coat, *formats.values())
    table, parts = tables.lay_out(key, rows, 5, CHUNK * GROUP)
    scalars = torch.empty(len(rows), SCALARS, device=tables.device)
    flag, sizes = usable.view(torch.uint8), {"COLUMNS": WIDTH, "SCALARS": SCALARS}
    # COAT's moments and a plain FP16 weight carry no scale of their own, and count as FP32 here.
    scaled = {"M": not m_coat, "V": not v_coat, "W": any(isinstance(w, ScalingTensor) for w in batch.weights)}
    scales_of = formats | {name: 23 for name, has in scaled.items() if not has}
    _scalars_kernel[(len(rows),)](
        table, hyper, amaxes, amaxes.shape[1], kept, kept.shape[1], flag if coefficient is None else coefficient, flag, scalars,
        CLIP=coefficient is not None, DECOUPLED=decoupled, num_warps=1, enable_fp_fusion=False, **scales_of, **sizes,
    )  # fmt: skip
    keep_master = isinstance(batch.masters[0], ScalingTensor) or not decoupled or any(isinstance(w, ScalingTensor) for w in batch.weights)
    skipped = 0
    for owners, aligned in parts:
        _coat_adamw_kernel[(owners.numel(),)](
            table, owners, skipped, scalars, kept, kept.shape[1], flag, KEEP_P=keep_master, M_COAT=m_coat, V_COAT=v_coat,
            DECOUPLED=decoupled, ALIGNED=aligned, HARDWARE=amaxes.is_cuda, GROUP=GROUP, TILE=TILE, CHUNK=CHUNK, num_warps=WARPS,
            enable_fp_fusion=False, **formats, **sizes,
        )  # fmt: skip
        skipped += owners.numel()
