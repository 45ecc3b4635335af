"""How kernels load and store optimizer states of every format, in functions of Triton. Twin: `msamp.kernels.reference.store`."""

import triton
import triton.language as tl

from msamp.kernels.triton.pack import _payload, _value
from msamp.numerics.formats import BF16
from msamp.numerics.stochastic_rounding import FIRST, HIGH, SECOND, SPREAD

HASH_SPREAD, HASH_FIRST, HASH_SECOND, HASH_HIGH = (tl.constexpr(x) for x in (SPREAD, FIRST, SECOND, HIGH))
BF16_MAX = tl.constexpr(BF16.max)


@triton.jit
def _hash(key, index, at, WIDE: tl.constexpr):
    """uint32: `stochastic_rounding.hashes` of the elements `index + at`; WIDE where indices need more than 32 bits."""
    second = (key >> 32).to(tl.uint32)
    if WIDE:
        index = index + at
        low = index.to(tl.uint32)
        second = second + (index >> 32).to(tl.uint32) * HASH_HIGH
    else:
        low = index.to(tl.uint32) + at.to(tl.uint32)
    h = low * HASH_SPREAD + key.to(tl.uint32)
    h = (h ^ (h >> 16)) * HASH_FIRST
    h = (h ^ (h >> 15)) * HASH_SECOND + second
    return h ^ (h >> 15)


@triton.jit
def _threshold(h, turn):
    """int32 in [0, 2^16), of the low half of a hash."""
    return ((h & 0xFFFF).to(tl.int32) + turn) & 0xFFFF


@triton.jit
def _next_below(y, MANTISSA: tl.constexpr):
    """The next smaller magnitude of a format, of FP32 magnitudes `y` that it holds, above 0.

    In FP32 and not on codes: a byte less a predicate came out wrong in code for Hopper (ptxas of CUDA 13, Triton 3.6).
    """
    TINY: tl.constexpr = 2.0**-6 if MANTISSA == 3 else 2.0**-14
    below = (y.to(tl.int32, bitcast=True) - (1 << (23 - MANTISSA))).to(tl.float32, bitcast=True)
    if MANTISSA != 7:  # BF16 has FP32's exponents
        below = tl.where(y <= TINY, y - TINY * 2.0**-MANTISSA, below)
    return below


@triton.jit
def _with_sign(magnitude, x):
    return (magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _stochastic(x, threshold, held_below, MANTISSA: tl.constexpr):
    """`stochastic_rounding.round_stochastically`; what is not below `held_below` but below the smallest normal value falls by one code."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    LARGEST: tl.constexpr = 448.0 if MANTISSA == 3 else (57344.0 if MANTISSA == 2 else (65504.0 if MANTISSA == 10 else BF16_MAX))
    TINY: tl.constexpr = 2.0**-6 if MANTISSA == 3 else (2.0**-126 if MANTISSA == 7 else 2.0**-14)
    magnitude = tl.abs(x)
    base = 0.0
    if MANTISSA != 7:
        base = tl.where(magnitude < TINY, TINY, 0.0)
    if SHIFT <= 16:  # noqa: SIM108 - a static branch
        added = threshold >> (16 - SHIFT)
    else:
        added = (threshold << (SHIFT - 16)) + (1 << (SHIFT - 17))
    bits = ((magnitude + base).to(tl.int32, bitcast=True) + added) & -(1 << SHIFT)
    y = bits.to(tl.float32, bitcast=True) - base
    if held_below is not None:
        y = tl.where((y >= held_below) & (y < TINY) & (y > 0), _next_below(y, MANTISSA), y)
    return tl.where(magnitude <= LARGEST, _with_sign(y, x), x)


@triton.jit
def _fallen(y, held_below, MANTISSA: tl.constexpr):
    """Values that a format holds: the next smaller magnitude of those that are not below `held_below`; `fallen` of the twin."""
    magnitude = tl.abs(y)
    held = (magnitude >= held_below) & (magnitude > 0)
    return _with_sign(tl.where(held, _next_below(magnitude, MANTISSA), magnitude), y)


@triton.jit
def _scaled(x, scale, MANTISSA: tl.constexpr):
    """`x * scale`; FP32 and BF16 have a scale of 1, which would cost an instruction for each element."""
    return x if MANTISSA == 23 or MANTISSA == 7 else x * scale


@triton.jit
def _read(pointer, at, inside, scale_inv, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """FP32 values, 0 outside."""
    return _scaled(_value(tl.load(pointer + at, mask=inside, other=0), MANTISSA, HARDWARE), scale_inv, MANTISSA)


@triton.jit
def _store(pointer, at, inside, v, scale, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, threshold=None, held_below=None):
    """Store, stochastically with a threshold; returns the stored payload as FP32, without its scale.

    Payloads with a magnitude that is not below `held_below` fall by one code.
    """
    x = _scaled(v, scale, MANTISSA)
    if threshold is not None:
        x = _stochastic(x, threshold, held_below, MANTISSA)
    payload = _payload(x, MANTISSA, HARDWARE)
    if threshold is None and held_below is not None:
        payload = _payload(_fallen(_value(payload, MANTISSA, HARDWARE), held_below, MANTISSA), MANTISSA, HARDWARE)
    tl.store(pointer + at, payload, mask=inside)
    return _value(payload, MANTISSA, HARDWARE)


@triton.jit
def _store_m(pointer, at, inside, m, before, g, scale, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, threshold):
    """`_store` of the first moment: where the gradient is 0 its code falls. `before` is what it was."""
    if MANTISSA == 23:
        stored = _store(pointer, at, inside, m, scale, MANTISSA, HARDWARE)
    else:
        held_below = tl.where(g == 0, tl.abs(_scaled(before, scale, MANTISSA)), float("inf"))
        stored = _store(pointer, at, inside, m, scale, MANTISSA, HARDWARE, threshold, held_below)
    return stored


@triton.jit
def _store_v(pointer, at, inside, v, scale, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, threshold):
    """`_store` of the second moment: what is above 0 stays above 0."""
    if MANTISSA == 23:
        stored = _store(pointer, at, inside, v, scale, MANTISSA, HARDWARE)
    else:
        # From its bits: as a constant BF16's, 2^-133, would be FP64.
        BITS: tl.constexpr = 0x3B000000 if MANTISSA == 3 else (0x37800000 if MANTISSA == 2 else (0x33800000 if MANTISSA == 10 else 0x10000))
        x = _scaled(v, scale, MANTISSA)
        x = tl.where(v > 0, tl.maximum(x, tl.full((), BITS, tl.int32).to(tl.float32, bitcast=True)), x)
        if threshold is not None:
            x = _stochastic(x, threshold, None, MANTISSA)
        payload = _payload(x, MANTISSA, HARDWARE)
        tl.store(pointer + at, payload, mask=inside)
        stored = _value(payload, MANTISSA, HARDWARE)
    return stored
