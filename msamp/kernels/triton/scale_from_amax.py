"""Compute scales from amaxes in one launch instead of 18 torch operations, and those of a stored weight in two. Twin:
`msamp.kernels.reference.scale_from_amax`.

Each program of the weight's first kernel writes the amax of its part; the second kernel, a single program, computes the scale from their
maximum. An atomic maximum would require a zeroed scalar, which is another launch.
"""

import torch
import triton
import triton.language as tl

from msamp.kernels.triton.cast import _block_amax
from msamp.numerics.scaling import _fields

BLOCK, MANY = 256, 1024  # amaxes of a program, and maxima read at a time
PART, PARTS = 4096, 8  # elements of a weight per iteration, and maximum iterations of a program


@triton.jit
def _scale(v, kept, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the scale of FP32 amaxes; `kept` if an amax is 0 or not finite."""
    bits = v.to(tl.int32, bitcast=True)
    exponent = EXPONENT - (bits >> 23) - ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    usable = (v > 0.0) & (v < float("inf"))
    return tl.where(usable, ((exponent + 127) << 23).to(tl.float32, bitcast=True), kept)


@triton.jit
def _inverse(scale):
    """1 / scale for a power of two from 2^-126 to 2^126, exact and without a division; NaN for NaN."""
    bits = 0x7F000000 - scale.to(tl.int32, bitcast=True)
    return tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)


@triton.jit(do_not_specialize=["numel", "otherwise"])
def _scale_from_amax_kernel(amax, last, scale, numel, otherwise, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    v = tl.load(amax + at, mask=inside, other=0.0)
    kept = tl.zeros((BLOCK,), tl.float32) + otherwise
    if last is not None:
        kept = tl.load(last + at, mask=inside)
    tl.store(scale + at, _scale(v, kept, EXPONENT, MANTISSA), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _scale_from_maxima_kernel(maxima, scale, count, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr):
    top = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        v = tl.load(maxima + at, mask=at < count, other=0.0)
        top = tl.maximum(top, tl.where(v == v, tl.abs(v), float("inf")))
    tl.store(scale, _scale(tl.max(top), 1.0, EXPONENT, MANTISSA))


def scale_from_amax(amax, fp_max, last, otherwise):
    """See the reference twin."""
    scale = torch.empty_like(amax)
    exponent, mantissa = _fields(fp_max)
    if amax.numel():
        _scale_from_amax_kernel[-(-amax.numel() // BLOCK),](
            amax, last, scale, amax.numel(), otherwise, EXPONENT=exponent, MANTISSA=mantissa, BLOCK=BLOCK, num_warps=4
        )
    return scale


def scale_from_maxima(maxima, fp_max):
    """See the reference twin. One program is enough: there are a few hundred maxima."""
    scale = torch.empty((), dtype=torch.float32, device=maxima.device)
    exponent, mantissa = _fields(fp_max)
    _scale_from_maxima_kernel[1,](maxima, scale, maxima.numel(), EXPONENT=exponent, MANTISSA=mantissa, BLOCK=MANY, num_warps=4)
    return scale


@triton.jit
def _amax_kernel(x, maxima, numel, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    top = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(BLOCKS):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.where(v == v, tl.abs(v), float("inf")))
    tl.store(maxima + tl.program_id(0), _block_amax(top))


@triton.jit(do_not_specialize=["count"])
def _weight_scales_kernel(
    maxima, stored, multipliers, scale_invs, count, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr
):
    weight = tl.program_id(0).to(tl.int64)
    top = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(maxima + weight * count + at, mask=at < count, other=0.0))
    factor = tl.load(stored + weight)
    scale = _scale(tl.max(top) * factor, 1.0, EXPONENT, MANTISSA)
    tl.store(multipliers + weight, scale * factor)
    tl.store(scale_invs + weight, _inverse(scale))


def weight_scales(payload, scale_inv, fp_max):
    """See the reference twin."""
    payload = payload.contiguous()
    numel, device = payload.numel(), payload.device
    programs = max(1, -(-numel // (PART * PARTS)))
    maxima = torch.empty(programs, dtype=torch.float32, device=device)
    multiplier, inverse = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))
    _amax_kernel[programs,](payload, maxima, numel, BLOCK=PART, BLOCKS=PARTS, num_warps=8)
    exponent, mantissa = _fields(fp_max)
    _weight_scales_kernel[1,](
        maxima, scale_inv, multiplier, inverse, programs, EXPONENT=exponent, MANTISSA=mantissa, BLOCK=MANY, num_warps=4
    )
    return multiplier, inverse
