"""Add a gradient to a sum in FP8 or FP16 in place, in two launches. Twin: `msamp.kernels.reference.accumulate`.

The first launch measures the amax of the sum, the second computes the sum again and stores it: 1 + 2 bytes are read twice and one is
written per element of a BF16 gradient and an FP8 sum. BF16 sums take 6 bytes.
"""

import triton
import triton.language as tl

from msamp.kernels.scalar_pool import take
from msamp.kernels.triton.cast import _bytes
from msamp.kernels.triton.pack import _amax_of_bits, _bits, _payload, _value
from msamp.kernels.triton.scale_from_amax import _scale
from msamp.kernels.triton.store import OF_M, _hash, _stochastic, _words
from msamp.numerics.formats import of_dtype
from msamp.numerics.scaling import _fields
from msamp.numerics.stochastic_rounding import SPREAD

KEY_SPREAD = tl.constexpr(SPREAD)
BLOCK, CHUNK, WARPS = 4096, 32768, 8  # elements per iteration and per program
LARGE = 256 * CHUNK  # smaller sums, such as an expert's matrix, would leave multiprocessors idle: a program has one block


@triton.jit
def _sum(g, payload, old, at, inside, FIRST: tl.constexpr, G: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    v = _value(tl.load(g + at, mask=inside, other=0), G, HARDWARE)
    if not FIRST:
        v = _value(tl.load(payload + at, mask=inside, other=0), MANTISSA, HARDWARE) * old + v
    return v


@triton.jit
def _measure_kernel(
    g, payload, scale_inv, draw, scratch, numel,
    FIRST: tl.constexpr, G: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Raise scratch[0] to the sum's amax. The first program copies the old scale_inv to scratch[1], since the second launch replaces it,
    and advances the draw, which no other program of this launch reads."""
    start = tl.program_id(0).to(tl.int64) * CHUNK
    old = 1.0
    if not FIRST:
        old = tl.load(scale_inv)
    if tl.program_id(0) == 0:
        tl.store(scratch + 1, old)
        if draw is not None:
            tl.store(draw, tl.load(draw) + 1)
    largest = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, CHUNK, BLOCK):
        at = start + first + tl.arange(0, BLOCK)
        inside = at < numel
        v = _sum(g, payload, old, at, inside, FIRST, G, MANTISSA, HARDWARE)
        largest = tl.maximum(largest, tl.where(inside, _bits(v), 0))
    tl.atomic_max(scratch, _amax_of_bits(largest), sem="relaxed")


@triton.jit
def _store_kernel(
    g, payload, scale_inv, draw, scratch, numel, key,
    FIRST: tl.constexpr, G: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    EXPONENT: tl.constexpr, LARGEST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * CHUNK
    amax = tl.load(scratch)
    old = tl.load(scratch + 1)
    scale = _scale(amax, 1.0, EXPONENT, LARGEST)
    if tl.program_id(0) == 0:
        tl.store(scale_inv, tl.where(amax < float("inf"), tl.div_rn(scale * 0.0 + 1.0, scale), float("nan")))
    if draw is not None:
        number = tl.load(draw)
        key = key ^ number ^ ((number >> 32) * KEY_SPREAD)
    for first in range(0, CHUNK, BLOCK):
        at = start + first + tl.arange(0, BLOCK)
        inside = at < numel
        v = _sum(g, payload, old, at, inside, FIRST, G, MANTISSA, HARDWARE) * scale
        if draw is not None:
            h, lane = _hash(key, start + first, tl.arange(0, BLOCK), WIDE, True)
            turn = lane.to(tl.uint32) * 0
            words = _words(h, lane, turn, OF_M.value[0], OF_M.value[1], OF_M.value[2], OF_M.value[3])
            v = _stochastic(v, words, None, MANTISSA)
        tl.store(payload + at, _payload(v, MANTISSA, HARDWARE), mask=inside)


@triton.jit
def _add_payload_kernel(
    g, payload, scale_inv, numel,
    REPLACE: tl.constexpr, G: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    v = _value(tl.load(payload + at, mask=inside, other=0), MANTISSA, HARDWARE) * tl.load(scale_inv)
    if not REPLACE:
        v += _value(tl.load(g + at, mask=inside, other=0), G, HARDWARE)
    tl.store(g + at, _payload(v, G, HARDWARE), mask=inside)


def accumulate(g, payload, scale_inv, draw, key, first):
    """See the reference twin."""
    numel, fmt = g.numel(), of_dtype(payload.dtype)
    chunk = CHUNK if numel >= LARGE else BLOCK
    constants = {
        "FIRST": first, "G": of_dtype(g.dtype).mantissa_bits, "MANTISSA": fmt.mantissa_bits, "HARDWARE": g.is_cuda,
        "BLOCK": BLOCK, "CHUNK": chunk, "num_warps": WARPS,
    }  # fmt: skip
    exponent, largest = _fields(fmt.max)
    scratch, stored, grid = take(g.device, 2), _bytes(payload), (max(1, -(-numel // chunk)),)
    _measure_kernel[grid](g, stored, scale_inv, draw, scratch, numel, **constants)
    _store_kernel[grid](
        g, stored, scale_inv, draw, scratch, numel, key, EXPONENT=exponent, LARGEST=largest, WIDE=numel >= 2**34, **constants
    )


def add_payload_(g, payload, scale_inv, *, replace=False):
    """See the reference twin."""
    numel, block = g.numel(), 2 * BLOCK
    _add_payload_kernel[max(1, -(-numel // block)),](
        g, _bytes(payload), scale_inv, numel, REPLACE=replace, G=of_dtype(g.dtype).mantissa_bits,
        MANTISSA=of_dtype(payload.dtype).mantissa_bits, HARDWARE=g.is_cuda, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
