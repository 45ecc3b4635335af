"""Compute scales from amaxes in one launch instead of 18 torch operations. Twin: `msamp.kernels.reference.scale_from_amax`."""

import torch
import triton
import triton.language as tl

from msamp.numerics.scaling import _fields

BLOCK, MANY = 256, 1024


@triton.jit
def _scale(v, kept, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the scale of FP32 amaxes; `kept` if an amax is 0 or not finite."""
    bits = v.to(tl.int32, bitcast=True)
    exponent = EXPONENT - (bits >> 23) - ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    usable = (v > 0.0) & (v < float("inf"))
    return tl.where(usable, ((exponent + 127) << 23).to(tl.float32, bitcast=True), kept)


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
        _scale_from_amax_kernel[triton.cdiv(amax.numel(), BLOCK),](
            amax, last, scale, amax.numel(), otherwise, EXPONENT=exponent, MANTISSA=mantissa, BLOCK=BLOCK, num_warps=4
        )
    return scale


def scale_from_maxima(maxima, fp_max):
    """See the reference twin. One program is enough: there are a few hundred maxima."""
    scale = torch.empty((), dtype=torch.float32, device=maxima.device)
    exponent, mantissa = _fields(fp_max)
    _scale_from_maxima_kernel[1,](maxima, scale, maxima.numel(), EXPONENT=exponent, MANTISSA=mantissa, BLOCK=MANY, num_warps=4)
    return scale
