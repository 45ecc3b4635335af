"""From amax to scale in one launch: as torch operations it is eighteen. Twin: `msamp.kernels.reference.scale_from_amax`."""

import torch
import triton
import triton.language as tl

from msamp.numerics.scaling import _fields

BLOCK = 256


@triton.jit(do_not_specialize=["numel", "otherwise"])
def _scale_from_amax_kernel(amax, last, scale, numel, otherwise, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    v = tl.load(amax + at, mask=inside, other=0.0)
    bits = v.to(tl.int32, bitcast=True)
    exponent = EXPONENT - (bits >> 23) - ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    kept = tl.zeros((BLOCK,), tl.float32) + otherwise
    if last is not None:
        kept = tl.load(last + at, mask=inside)
    found = (v > 0.0) & (v < float("inf"))
    tl.store(scale + at, tl.where(found, ((exponent + 127) << 23).to(tl.float32, bitcast=True), kept), mask=inside)


def scale_from_amax(amax: torch.Tensor, fp_max: float, last: torch.Tensor | None, otherwise: float) -> torch.Tensor:
    """See the reference twin."""
    scale = torch.empty_like(amax)
    exponent, mantissa = _fields(fp_max)
    if amax.numel():
        _scale_from_amax_kernel[triton.cdiv(amax.numel(), BLOCK),](
            amax, last, scale, amax.numel(), otherwise, EXPONENT=exponent, MANTISSA=mantissa, BLOCK=BLOCK, num_warps=4
        )
    return scale
