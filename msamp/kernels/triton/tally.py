"""Sums over a tensor and its payload, one read of each. Twin: `msamp.kernels.reference.tally`.

Each program stores its own FP64 sums, and a second launch adds them in a fixed order, so a graph and an eager step give the same bits.
"""

import torch
import triton
import triton.language as tl

from msamp.kernels.triton.cast import _bytes
from msamp.kernels.triton.pack import _value
from msamp.numerics.formats import of_dtype

BLOCK, CHUNK = 2048, 65536  # elements per iteration and per program
COUNT_CHUNK = 8192  # with 65,536 the matrix of an expert, 2 to 4 million elements, occupied half of the multiprocessors
TALLY_SUMS, UPDATE_SUMS = 6, 7
FINISH = 1024
# A captured step must find every variant compiled, although its scales have other addresses than in the eager step before.
EVERYWHERE = ["row", "scale_inv", "programs"]


@triton.jit
def _block(x, payload, first, start, numel, FROM: tl.constexpr, TO: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr):
    """A block of values and codes, and for each whether the value is not zero, and whether it is not zero but its code is; int32."""
    at = first + start + tl.arange(0, BLOCK)
    v = _value(tl.load(x + at, mask=at < numel, other=0), FROM, HARDWARE)
    code = _value(tl.load(payload + at, mask=at < numel, other=0), TO, HARDWARE)
    return v, code, (v != 0).to(tl.int32), ((v != 0) & (code == 0)).to(tl.int32)


@triton.jit(do_not_specialize=EVERYWHERE[:1])
def _count_kernel(
    row, x, payload, numel,
    FROM: tl.constexpr, TO: tl.constexpr, LIMIT: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The order of integer sums does not matter, so each program adds its sums to the row directly."""
    first = tl.program_id(0).to(tl.int64) * CHUNK
    left = tl.minimum(numel - first, CHUNK).to(tl.int32)
    nonzero = tl.zeros((BLOCK,), tl.int32)
    saturated = tl.zeros((BLOCK,), tl.int32)
    vanished = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, left, BLOCK):
        _, code, present, lost = _block(x, payload, first, start, numel, FROM, TO, HARDWARE, BLOCK)
        nonzero += present
        saturated += (tl.abs(code) == LIMIT).to(tl.int32)
        vanished += lost
    tl.atomic_add(row, tl.sum(nonzero, 0).to(tl.int64))
    tl.atomic_add(row + 1, tl.sum(saturated, 0).to(tl.int64))
    tl.atomic_add(row + 2, tl.sum(vanished, 0).to(tl.int64))


@triton.jit(do_not_specialize=EVERYWHERE[1:])
def _tally_kernel(
    x, payload, scale_inv, numel, partials, programs,
    FROM: tl.constexpr, TO: tl.constexpr, LIMIT: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = program.to(tl.int64) * CHUNK
    left = tl.minimum(numel - first, CHUNK).to(tl.int32)
    inv = tl.load(scale_inv).to(tl.float64)
    nonzero = tl.zeros((BLOCK,), tl.int32)
    vanished = tl.zeros((BLOCK,), tl.int32)
    saturated = tl.zeros((BLOCK,), tl.int32)
    signal = tl.zeros((BLOCK,), tl.float64)
    noise = tl.zeros((BLOCK,), tl.float64)
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, left, BLOCK):
        v, code, present, lost = _block(x, payload, first, start, numel, FROM, TO, HARDWARE, BLOCK)
        nonzero += present
        vanished += lost
        saturated += (tl.abs(code) == LIMIT).to(tl.int32)
        wide = v.to(tl.float64)
        error = code.to(tl.float64) * inv - wide
        signal += wide * wide
        noise += error * error
        # The bits of magnitudes have the order of the magnitudes, with NaN above infinity.
        largest = tl.maximum(largest, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    out = partials + program
    tl.store(out, left.to(tl.float64))
    tl.store(out + programs, tl.sum(nonzero, 0).to(tl.float64))
    tl.store(out + 2 * programs, tl.sum(vanished, 0).to(tl.float64))
    tl.store(out + 3 * programs, tl.sum(saturated, 0).to(tl.float64))
    tl.store(out + 4 * programs, tl.sum(signal, 0))
    tl.store(out + 5 * programs, tl.sum(noise, 0))
    tl.store(out + 6 * programs, tl.max(largest, 0).to(tl.float32, bitcast=True).to(tl.float64))


@triton.jit(do_not_specialize=EVERYWHERE[1:])
def _tally_update_kernel(
    before, wanted, stored, scale_inv, numel, partials, programs,
    TO: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = program.to(tl.int64) * CHUNK
    left = tl.minimum(numel - first, CHUNK).to(tl.int32)
    inv = tl.load(scale_inv).to(tl.float64)
    squares = tl.zeros((BLOCK,), tl.float64)
    wished = tl.zeros((BLOCK,), tl.float64)
    product = tl.zeros((BLOCK,), tl.float64)
    lost = tl.zeros((BLOCK,), tl.int32)
    distance = tl.zeros((BLOCK,), tl.float64)
    along = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, left, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        inside = at < numel
        old = tl.load(before + at, mask=inside, other=0.0).to(tl.float64)
        update = tl.load(wanted + at, mask=inside, other=0.0).to(tl.float64) - old
        after = _value(tl.load(stored + at, mask=inside, other=0), TO, HARDWARE).to(tl.float64) * inv
        effective = after - old
        squares += after * after
        wished += update * update
        product += update * effective
        lost += ((update != 0) & (effective == 0)).to(tl.int32)
        distance += tl.abs(update)
        along += ((update > 0).to(tl.float64) - (update < 0).to(tl.float64)) * effective
    out = partials + program
    tl.store(out, left.to(tl.float64))
    tl.store(out + programs, tl.sum(squares, 0))
    tl.store(out + 2 * programs, tl.sum(wished, 0))
    tl.store(out + 3 * programs, tl.sum(product, 0))
    tl.store(out + 4 * programs, tl.sum(lost, 0).to(tl.float64))
    tl.store(out + 5 * programs, tl.sum(distance, 0))
    tl.store(out + 6 * programs, tl.sum(along, 0))


@triton.jit(do_not_specialize=EVERYWHERE)
def _finish_kernel(partials, programs, row, scale_inv, SUMS: tl.constexpr, FINISH: tl.constexpr):
    """One program per column of the row: sums, then the amax, then the scale."""
    column = tl.program_id(0)
    at = tl.arange(0, FINISH)
    old = tl.load(row + column)
    if column < SUMS:
        total = tl.zeros((FINISH,), tl.float64)
        for start in range(0, programs, FINISH):
            total += tl.load(partials + column * programs + start + at, mask=start + at < programs, other=0.0)
        tl.store(row + column, old + tl.sum(total, 0))
    elif column == SUMS:
        largest = tl.zeros((FINISH,), tl.int64)
        for start in range(0, programs, FINISH):
            part = tl.load(partials + column * programs + start + at, mask=start + at < programs, other=0.0)
            largest = tl.maximum(largest, part.to(tl.int64, bitcast=True))
        bits = tl.maximum(tl.max(largest, 0), old.to(tl.int64, bitcast=True))
        tl.store(row + column, bits.to(tl.float64, bitcast=True))
    else:
        tl.store(row + column, 1.0 / tl.load(scale_inv).to(tl.float64))


def _mantissa(x: torch.Tensor) -> int:
    return of_dtype(x.dtype).mantissa_bits


def count_(row, x, payload):
    """See the reference twin."""
    if x.numel():
        _count_kernel[(-(-x.numel() // COUNT_CHUNK),)](
            row, _bytes(x.contiguous()), _bytes(payload.contiguous()), x.numel(),
            FROM=_mantissa(x), TO=_mantissa(payload), LIMIT=of_dtype(payload.dtype).max,
            HARDWARE=x.is_cuda, BLOCK=BLOCK, CHUNK=COUNT_CHUNK, num_warps=8,
        )  # fmt: skip


def tally_(row, x, payload, scale_inv):
    """See the reference twin."""
    if not x.numel():
        return
    programs = -(-x.numel() // CHUNK)
    partials = torch.empty(TALLY_SUMS + 1, programs, dtype=torch.float64, device=x.device)
    _tally_kernel[(programs,)](
        _bytes(x.contiguous()), _bytes(payload.contiguous()), scale_inv, x.numel(), partials, programs,
        FROM=_mantissa(x), TO=_mantissa(payload), LIMIT=of_dtype(payload.dtype).max,
        HARDWARE=x.is_cuda, BLOCK=BLOCK, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    _finish_kernel[(TALLY_SUMS + 2,)](partials, programs, row, scale_inv, SUMS=TALLY_SUMS, FINISH=FINISH)


def tally_update_(row, before, wanted, stored, scale_inv):
    """See the reference twin."""
    if not before.numel():
        return
    programs = -(-before.numel() // CHUNK)
    partials = torch.empty(UPDATE_SUMS, programs, dtype=torch.float64, device=before.device)
    _tally_update_kernel[(programs,)](
        before.contiguous(), wanted.contiguous(), _bytes(stored.contiguous()), scale_inv, before.numel(), partials, programs,
        TO=_mantissa(stored), HARDWARE=before.is_cuda, BLOCK=BLOCK, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    _finish_kernel[(UPDATE_SUMS,)](partials, programs, row, scale_inv, SUMS=UPDATE_SUMS, FINISH=FINISH)
