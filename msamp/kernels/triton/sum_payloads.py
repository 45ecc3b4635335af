"""Sum the ranks' payloads in FP32, with one read of each. Twin: `msamp.kernels.reference.sum_payloads`."""

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.sum_payloads import check_payloads
from msamp.kernels.triton.cast import _constants, _fp8_code, _rounded
from msamp.kernels.triton.pack import _value
from msamp.numerics.formats import of_dtype

BLOCK, WARPS = 4096, 8


@triton.jit
def _sum_payloads_kernel(
    payloads, own, factor, y, numel,
    RANKS: tl.constexpr, OWN: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = _value(tl.load((own if OWN == 0 else payloads) + at, mask=inside, other=0), FROM, HARDWARE)
    for rank in tl.static_range(1, RANKS):
        part = own + at if rank == OWN else payloads + rank * numel.to(tl.int64) + at
        total += _value(tl.load(part, mask=inside, other=0), FROM, HARDWARE)
    if factor is not None:
        total *= tl.load(factor)
    if MANTISSA == 0:
        tl.store(y + at, _rounded(total, y.dtype.element_ty, HARDWARE), mask=inside)
    else:
        tl.store(y + at, _fp8_code(total, FP8_MAX, MANTISSA, BIAS, HARDWARE), mask=inside)


def sum_payloads(payloads, factor, dtype, own=None, rank=0):
    """See the reference twin."""
    check_payloads(payloads, own, rank)
    ranks, numel = payloads.shape
    y = torch.empty(numel, dtype=dtype, device=payloads.device)
    _sum_payloads_kernel[max(1, triton.cdiv(numel, BLOCK)),](
        _bytes(payloads), _bytes(payloads if own is None else own), factor, _bytes(y), numel,
        RANKS=ranks, OWN=-1 if own is None else rank, FROM=of_dtype(payloads.dtype).mantissa_bits,
        BLOCK=BLOCK, num_warps=WARPS, **_constants(dtype, y.device),
    )  # fmt: skip
    return y


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x
