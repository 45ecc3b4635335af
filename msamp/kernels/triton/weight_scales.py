"""The scales between a stored weight and its FP8 operand. Twin: `msamp.kernels.reference.weight_scales`.

Each program of the first kernel writes the amax of its part; the second kernel, a single program, computes the scale from their maximum. An
atomic maximum would require a zeroed scalar, which is another launch.
"""

import torch
import triton
import triton.language as tl

from msamp.kernels.triton.cast import _block_amax
from msamp.kernels.triton.cast_transpose import _inverse
from msamp.kernels.triton.scale_from_amax import _scale
from msamp.numerics.scaling import _fields

BLOCK, BLOCKS, MANY = 4096, 8, 1024  # elements per iteration, maximum iterations per program, and maxima read at a time


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
    maxima, stored, multiplier, scale_inv, count, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr
):
    top = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(maxima + at, mask=at < count, other=0.0))
    factor = tl.load(stored)
    scale = _scale(tl.max(top) * factor, 1.0, EXPONENT, MANTISSA)
    tl.store(multiplier, scale * factor)
    tl.store(scale_inv, _inverse(scale))


def weight_scales(payload, scale_inv, fp_max):
    """See the reference twin."""
    payload = payload.contiguous()
    numel, device = payload.numel(), payload.device
    programs = max(1, -(-numel // (BLOCK * BLOCKS)))
    maxima = torch.empty(programs, dtype=torch.float32, device=device)
    multiplier, inverse = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))
    _amax_kernel[programs,](payload, maxima, numel, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=8)
    exponent, mantissa = _fields(fp_max)
    _weight_scales_kernel[1,](
        maxima, scale_inv, multiplier, inverse, programs, EXPONENT=exponent, MANTISSA=mantissa, BLOCK=MANY, num_warps=4
    )
    return multiplier, inverse
