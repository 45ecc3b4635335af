"""Sum partial column sums in one launch, and ranks' payloads with one read of each. Twin: `msamp.kernels.reference.sums`."""

import torch
import triton
import triton.language as tl

from msamp.kernels.triton.cast import _bytes, _fp8_code, _rounded, fp8_constants
from msamp.kernels.triton.pack import _value
from msamp.numerics.formats import of_dtype

BLOCK, BLOCK_P, BLOCK_N = 4096, 64, 32


@triton.jit
def _sum_parts_kernel(
    parts, sums, rows, widths, COUNT: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    for i in tl.static_range(COUNT):
        M, N = rows[i], widths[i]
        if (block >= 0) & (block < tl.cdiv(N, BLOCK_N)):
            n = block * BLOCK_N + tl.arange(0, BLOCK_N)
            total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
            for first in range(0, M, BLOCK_P):
                p = first + tl.arange(0, BLOCK_P)
                inside = (p < M)[:, None] & (n < N)[None, :]
                total += tl.load(parts[i] + p[:, None] * N + n[None, :], mask=inside, other=0.0)
            tl.store(sums[i] + n, _rounded(tl.sum(total, axis=0), sums[i].dtype.element_ty, HARDWARE), mask=n < N)
        block -= tl.cdiv(N, BLOCK_N)


def sum_parts(parts, dtype):
    """See the reference twin."""
    sums = [torch.empty(x.shape[1], dtype=dtype, device=x.device) for x in parts]
    rows, widths = (tuple(x.shape[i] for x in parts) for i in range(2))
    _sum_parts_kernel[sum(-(-width // BLOCK_N) for width in widths),](
        tuple(parts), tuple(sums), rows, widths,
        COUNT=len(sums), HARDWARE=sums[0].is_cuda, BLOCK_P=BLOCK_P, BLOCK_N=BLOCK_N, num_warps=4,
    )  # fmt: skip
    return sums


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
    ranks, numel = payloads.shape
    y = torch.empty(numel, dtype=dtype, device=payloads.device)
    _sum_payloads_kernel[max(1, -(-numel // BLOCK)),](
        _bytes(payloads), _bytes(payloads if own is None else own), factor, _bytes(y), numel,
        RANKS=ranks, OWN=-1 if own is None else rank, FROM=of_dtype(payloads.dtype).mantissa_bits,
        BLOCK=BLOCK, num_warps=8, **fp8_constants(dtype, y.device),
    )  # fmt: skip
    return y
