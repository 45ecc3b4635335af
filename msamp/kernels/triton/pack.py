"""Cast many tensors, or their sums over ranks, to one flat buffer in one launch: one read, one write. Twin: `msamp.kernels.reference.pack`.

This file also contains the functions with which kernels over many tensors read and write any format. Mantissa bits identify a format.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from msamp.kernels.tables import numbered
from msamp.kernels.triton.cast import _fp8_code
from msamp.numerics.formats import of_dtype

BLOCK, CHUNK, WARPS = 4096, 32768, 8  # elements per iteration and per program
MEASURED_BLOCK, MEASURED_WARPS = 1024, 4  # with tallies, whose 64-bit sums take registers (H200: tools/bench/LOG.md)


class Head(NamedTuple):
    """The first columns of every row."""

    first: int  # number of its first program, set by `Tables.lay_out`
    numel: int


class PackRow(NamedTuple):
    """A run of a tensor: its number of elements, source and destination addresses, bytes between the rows of its tensor, the index of the
    tensor, and its own index."""

    numel: int
    source: int
    target: int
    stride: int
    tensor: int
    run: int


COLUMNS = 1 + len(PackRow._fields)
HEAD, ROW = tl.constexpr(numbered(Head, 0)), tl.constexpr(numbered(PackRow))


@triton.jit
def _pointer(address, MANTISSA: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to the payload at an int64 address; FP8 payloads are read and written as bytes."""
    if MANTISSA == 23:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif MANTISSA == 7:
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif MANTISSA == 10:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _value(raw, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """FP32 value of a payload."""
    if MANTISSA > 3:
        value = raw.to(tl.float32)
    elif HARDWARE:
        FP8: tl.constexpr = tl.float8e4nv if MANTISSA == 3 else tl.float8e5
        value = raw.to(FP8, bitcast=True).to(tl.float32)
    else:  # the interpreter's conversion does not support NaN
        BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
        FIRST_NAN: tl.constexpr = 0x7F if MANTISSA == 3 else 0x7D
        code = raw.to(tl.int32)
        value = ((code & 0x7F) << (23 - MANTISSA)).to(tl.float32, bitcast=True) * 2.0 ** (127 - BIAS)
        value = tl.where((code & 0x7F) >= FIRST_NAN, float("nan"), value)
        value = tl.where((MANTISSA == 2) & ((code & 0x7F) == 0x7C), float("inf"), value)
        value = tl.where(code >= 0x80, -value, value)
    return value


@triton.jit
def _payload(v, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, TOWARD_ZERO: tl.constexpr = False):
    """Round FP32 `v` to nearest even in the payload's format: FP8 and FP16 saturate, BF16 and FP32 do not; NaN remains NaN. FP16 can be
    rounded toward zero."""
    if MANTISSA <= 3:
        FP8: tl.constexpr = tl.float8e4nv if MANTISSA == 3 else tl.float8e5
        if HARDWARE:  # the conversion instruction saturates
            payload = v.to(FP8).to(tl.uint8, bitcast=True)
        else:
            payload = _fp8_code(v, 448.0 if MANTISSA == 3 else 57344.0, MANTISSA, 7 if MANTISSA == 3 else 15, False)
    elif MANTISSA == 10 and HARDWARE:
        ASSEMBLY: tl.constexpr = f"cvt.{'rz' if TOWARD_ZERO else 'rn'}.satfinite.f16x2.f32 $0, $2, $1;"
        payload = tl.inline_asm_elementwise(ASSEMBLY, "=r,f,f", [v], dtype=tl.float16, is_pure=True, pack=2)
    elif MANTISSA == 10:
        if TOWARD_ZERO:
            normal = (v.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
            small = tl.where(tl.abs(v) < 2.0**-14, v, 0.0)
            v = tl.where(small != 0, (small * 16777216.0).to(tl.int32).to(tl.float32) * 2.0**-24, normal)
        payload = tl.clamp(v, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    elif MANTISSA == 23:
        payload = v
    elif HARDWARE:
        payload = v.to(tl.bfloat16)
    else:  # the interpreter's conversion truncates
        bits = v.to(tl.int32, bitcast=True)
        even = tl.where(v == v, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        payload = even.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return payload


@triton.jit
def _span(table, owners, skipped, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """This program's row of the table, the first of its elements, and how many it has."""
    row = table + tl.load(owners + tl.program_id(0)) * COLUMNS
    first = (skipped + tl.program_id(0) - tl.load(row + HEAD.value.first)) * CHUNK
    left = tl.minimum(tl.load(row + HEAD.value.numel) - first, CHUNK).to(tl.int32)
    if ALIGNED:
        left = tl.multiple_of(left, 16)
    return row, first, left


@triton.jit
def _bits(v):
    """The bits of magnitudes, which have the order of the magnitudes, with NaN above infinity."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _e4m3_square(v):
    """The square of an E4M3 value `v` in units of 2^-18, int64. Every value is a multiple of 2^-9, so the square's 36 bits are exact.

    Adding 3 * 2^22 puts the multiple in the lowest bits; a conversion instruction takes four times as long.
    """
    k = ((v * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int64)
    return k * k


@triton.jit
def _in_payload_units(total):
    """Split a sum of `_e4m3_square` into whole units of 2^3 and 2^-30 units."""
    return total >> 21, (total & 0x1FFFFF) << 9


@triton.jit
def _amax_of_bits(largest):
    """The FP32 value of the largest `_bits`; infinity for NaN."""
    return tl.minimum(tl.max(largest, 0), 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["skipped"])
def _pack_kernel(
    table, owners, skipped, factors, unless, amaxes, tallies,
    FROM: tl.constexpr, TO: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr, HARDWARE: tl.constexpr,
    RANKS: tl.constexpr, DIVISOR: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, first, left = _span(table, owners, skipped, COLUMNS, CHUNK, ALIGNED)
    tensor = tl.load(row + ROW.value.tensor)
    factor = 1.0
    if SCALED:
        factor = tl.load(factors + tensor)
    if unless is not None:  # noqa: SIM102 - Triton evaluates both sides of an `and`
        if tl.load(unless + tensor) == factor:
            return
    source = tl.load(row + ROW.value.source)
    stride = tl.load(row + ROW.value.stride)
    x = _pointer(source, FROM, ALIGNED) + first
    y = _pointer(tl.load(row + ROW.value.target), TO, ALIGNED) + first
    largest = tl.zeros((BLOCK,), tl.int32)
    largest_code = tl.zeros((BLOCK,), tl.int32)
    squares = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, left, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = _value(tl.load(x + at, mask=at < left, other=0), FROM, HARDWARE)
        for rank in tl.static_range(1, RANKS):
            part = _pointer(source + rank * stride, FROM, ALIGNED) + first
            v += _value(tl.load(part + at, mask=at < left, other=0), FROM, HARDWARE)
        if DIVISOR > 1:
            v = tl.div_rn(v, DIVISOR * 1.0)
        if amaxes is not None:
            largest = tl.maximum(largest, _bits(v))
        code = _payload(v * factor, TO, HARDWARE)
        tl.store(y + at, code, mask=at < left)
        if tallies is not None:
            stored = _value(code, TO, HARDWARE)
            largest_code = tl.maximum(largest_code, _bits(stored))
            squares += _e4m3_square(stored)
    if amaxes is not None:
        tl.atomic_max(amaxes + tensor, _amax_of_bits(largest), sem="relaxed")
    if tallies is not None:
        tally = tallies + 3 * tl.load(row + ROW.value.run)
        whole, rest = _in_payload_units(tl.sum(squares, 0))
        tl.atomic_max(tally, _amax_of_bits(largest_code).to(tl.int32, bitcast=True).to(tl.int64), sem="relaxed")
        tl.atomic_add(tally + 1, whole, sem="relaxed")
        tl.atomic_add(tally + 2, rest, sem="relaxed")


def pack(tables, xs, pieces, out, factors, *, amaxes=None, tallies=None, unless=None, ranks=1, divisor=1):
    """See the reference twin."""
    base, size = out.data_ptr(), out.element_size()
    addresses, dtypes = [x.data_ptr() for x in xs], [x.dtype for x in xs]
    strides = [x.nbytes // ranks if ranks > 1 else 0 for x in xs]
    block, warps = (BLOCK, WARPS) if tallies is None else (MEASURED_BLOCK, MEASURED_WARPS)
    for dtype in set(dtypes):
        rows = [
            PackRow(elements, addresses[i] + first * dtype.itemsize, base + start * size, strides[i], i, run)
            for run, (i, first, elements, start) in enumerate(pieces)
            if dtypes[i] == dtype
        ]
        table, parts = tables.lay_out(("pack", dtype), rows, 3, CHUNK, again=unless is not None)
        skipped = 0
        for owners, aligned in parts:
            _pack_kernel[(owners.numel(),)](
                table, owners, skipped, owners if factors is None else factors, unless, amaxes, tallies,
                FROM=of_dtype(dtype).mantissa_bits, TO=of_dtype(out.dtype).mantissa_bits, SCALED=factors is not None,
                ALIGNED=aligned, HARDWARE=out.is_cuda, RANKS=ranks, DIVISOR=divisor,
                BLOCK=block, CHUNK=CHUNK, COLUMNS=COLUMNS, num_warps=warps,
            )  # fmt: skip
            skipped += owners.numel()
