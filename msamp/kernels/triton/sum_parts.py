"""Sum and round the partial column sums of several tensors in one launch. Twin: `msamp.kernels.reference.sum_parts`."""

import torch
import triton
import triton.language as tl

from msamp.kernels.triton.cast import _rounded

BLOCK_P, BLOCK_N, WARPS = 64, 32, 4


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
    _sum_parts_kernel[sum(triton.cdiv(width, BLOCK_N) for width in widths),](
        tuple(parts), tuple(sums), rows, widths,
        COUNT=len(sums), HARDWARE=sums[0].is_cuda, BLOCK_P=BLOCK_P, BLOCK_N=BLOCK_N, num_warps=WARPS,
    )  # fmt: skip
    return sums
