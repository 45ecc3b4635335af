"""Triton functions that load and store optimizer states in every format. Twin: `msamp.kernels.reference.store`."""

import triton
import triton.language as tl

from msamp.kernels.triton.pack import _payload, _value
from msamp.numerics.stochastic_rounding import FIRST, HIGH, LANES, MULTIPLIERS, SECOND, SPREAD

HASH_SPREAD, HASH_FIRST, HASH_SECOND, HASH_HIGH = (tl.constexpr(x) for x in (SPREAD, FIRST, SECOND, HIGH))
HASH_LANES, OF_M, OF_V, OF_P = (tl.constexpr(x) for x in (LANES, *MULTIPLIERS.values()))


@triton.jit
def _hash(key, index, at, WIDE: tl.constexpr, WHOLE: tl.constexpr):
    """Return `stochastic_rounding.hashes` of the elements `index + at`, uint32, and the lane of each.

    Args:
        WIDE: whether indices need more than 34 bits.
        WHOLE: whether `index` is a multiple of the number of lanes. Then the compiler computes a hash that elements share only once.
    """
    if WHOLE:
        lane, inner = at % HASH_LANES, at // HASH_LANES
        group = index // HASH_LANES
    else:
        lane, inner = (index + at) % HASH_LANES, (index + at) // HASH_LANES
        group = index * 0
    second = (key >> 32).to(tl.uint32)
    if WIDE:
        second += ((group + inner) >> 32).to(tl.uint32) * HASH_HIGH
    h = (group.to(tl.uint32) + inner.to(tl.uint32)) * HASH_SPREAD + key.to(tl.uint32)
    h = (h ^ (h >> 16)) * HASH_FIRST
    h = (h ^ (h >> 15)) * HASH_SECOND + second
    return h ^ (h >> 15), lane


@triton.jit
def _words(h, lane, turn, FIRST_LANE: tl.constexpr, SECOND_LANE: tl.constexpr, THIRD_LANE: tl.constexpr, FOURTH_LANE: tl.constexpr):
    """Return `Thresholds.of` a state: 32 random bits per element, from its hash and the multipliers of the lanes."""
    first_two = tl.where(lane == 0, FIRST_LANE, SECOND_LANE)
    return h * tl.where(lane < 2, first_two, tl.where(lane == 2, THIRD_LANE, FOURTH_LANE)).to(tl.uint32) + turn


@triton.jit
def _draws(key, index, at, turn, WIDE: tl.constexpr, WHOLE: tl.constexpr):
    """Return random words for m, v and master of the elements `index + at`. The compiler removes those that are not used."""
    h, lane = _hash(key, index, at, WIDE, WHOLE)
    of_m = _words(h, lane, turn, OF_M.value[0], OF_M.value[1], OF_M.value[2], OF_M.value[3])
    of_v = _words(h, lane, turn, OF_V.value[0], OF_V.value[1], OF_V.value[2], OF_V.value[3])
    of_p = _words(h, lane, turn, OF_P.value[0], OF_P.value[1], OF_P.value[2], OF_P.value[3])
    return of_m, of_v, of_p


@triton.jit
def _next_below(y, MANTISSA: tl.constexpr):
    """Return the next smaller magnitude in a format, for FP32 magnitudes `y` above 0 that the format represents.

    It works on FP32 values, not codes: subtracting a predicate from a byte was miscompiled for Hopper (ptxas of CUDA 13, Triton 3.6).
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
def _or_nan(y, x):
    """`y`, or NaN if `x` is not finite: its bits could have become a finite number."""
    return tl.fma(x, tl.full((), 0.0, tl.float32), y)


@triton.jit
def _stochastic(x, words, no_gradient, MANTISSA: tl.constexpr):
    """`stochastic_rounding.round_stochastically`; where `no_gradient`, values below the smallest normal one round toward zero."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    if MANTISSA == 7:
        added = (words >> (32 - SHIFT)).to(tl.int32, bitcast=True)
        y = ((x.to(tl.int32, bitcast=True) + added) & -(1 << SHIFT)).to(tl.float32, bitcast=True)
    else:
        TINY: tl.constexpr = 2.0**-6 if MANTISSA == 3 else 2.0**-14
        magnitude = tl.abs(x)
        subnormal = magnitude < TINY
        base = tl.where(subnormal, TINY, 0.0)
        if no_gradient is not None:
            words = tl.where(no_gradient & subnormal, 0, words)
        added = (words >> (32 - SHIFT)).to(tl.int32, bitcast=True)
        bits = ((magnitude + base).to(tl.int32, bitcast=True) + added) & -(1 << SHIFT)
        y = _with_sign(bits.to(tl.float32, bitcast=True) - base, x)
    return _or_nan(y, x)


@triton.jit
def _fallen(y, held_below, MANTISSA: tl.constexpr):
    """Return representable values with the next smaller magnitude for those that are not below `held_below`, as the twin's `fallen`."""
    magnitude = tl.abs(y)
    held = (magnitude >= held_below) & (magnitude > 0)
    return _with_sign(tl.where(held, _next_below(magnitude, MANTISSA), magnitude), y)


@triton.jit
def _scaled(x, scale, MANTISSA: tl.constexpr):
    """`x * scale`; for FP32 and BF16, whose scale is 1, without the multiplication."""
    return x if MANTISSA == 23 or MANTISSA == 7 else x * scale


@triton.jit
def _read(pointer, at, inside, scale_inv, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """Load FP32 values, 0 outside."""
    return _scaled(_value(tl.load(pointer + at, mask=inside, other=0), MANTISSA, HARDWARE), scale_inv, MANTISSA)


@triton.jit
def _store(pointer, at, inside, x, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, TOWARD_ZERO: tl.constexpr = False):
    """Store FP32 `x`, which is already scaled; return the payload as FP32."""
    payload = _payload(x, MANTISSA, HARDWARE, TOWARD_ZERO)
    tl.store(pointer + at, payload, mask=inside)
    return _value(payload, MANTISSA, HARDWARE)


@triton.jit
def _store_m(
    pointer, at, inside, m, before, g, scale, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, words, SR: tl.constexpr
):  # fmt: skip
    """Store the first moment, formerly `before`; return the payload as FP32. With nearest rounding its code decreases if the gradient is
    0."""
    x = _scaled(m, scale, MANTISSA)
    if SR:
        x = _stochastic(x, words, g == 0, MANTISSA)
    elif MANTISSA != 23:
        held_below = tl.where(g == 0, tl.abs(_scaled(before, scale, MANTISSA)), float("inf"))
        x = _fallen(_value(_payload(x, MANTISSA, HARDWARE), MANTISSA, HARDWARE), held_below, MANTISSA)
    return _store(pointer, at, inside, x, MANTISSA, HARDWARE)


@triton.jit
def _store_v(pointer, at, inside, v, scale, floor, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, words, SR: tl.constexpr):
    """Store the second moment, at least `floor` in units of its payload; return the payload as FP32."""
    x = _scaled(v, scale, MANTISSA)
    if MANTISSA != 23:
        x = tl.maximum(x, floor, propagate_nan=tl.PropagateNan.ALL)
    if SR:
        x = _stochastic(x, words, None, MANTISSA)
    return _store(pointer, at, inside, x, MANTISSA, HARDWARE)


@triton.jit
def _store_master(pointer, at, inside, p, scale, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, words, SR: tl.constexpr):
    """Store the master; return the payload as FP32."""
    x = _scaled(p, scale, MANTISSA)
    if SR and MANTISSA == 10:  # as for other formats, but subnormals drop the bits below a code
        y = (x.to(tl.int32, bitcast=True) + (words >> 19).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        x = _or_nan(y, x)
    elif SR:
        x = _stochastic(x, words, None, MANTISSA)
    return _store(pointer, at, inside, x, MANTISSA, HARDWARE, SR and MANTISSA == 10)
