"""Transpose of an FP8 payload, in one read. Twin: `msamp.kernels.reference.transpose`."""

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.transpose import check_payload
from msamp.kernels.triton.cast_transpose import _load_rows, _put_transposed, _tile

TILE_M, TILE_N, WARPS = 128, 128, 4


@triton.jit
def _transpose_kernel(x, y, M, N, ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    quad, column = tl.program_id(0).to(tl.int64) * (TILE_M // 4), tl.program_id(1).to(tl.int64) * TILE_N
    q, n, origin, at = _tile(quad, N, column, TILE_M, TILE_N)
    left, columns = (M - 4 * quad).to(tl.int32), n < (N - column).to(tl.int32)
    codes = x.to(tl.pointer_type(tl.uint8), bitcast=True)
    x0, x1, x2, x3 = _load_rows(codes + origin, at, N, q, left, columns)
    words = x0.to(tl.int32) | (x1.to(tl.int32) << 8) | (x2.to(tl.int32) << 16) | (x3.to(tl.int32) << 24)
    _put_transposed(words, y, quad, column, q, n, M, left, columns, ALIGNED)


def transpose(x):
    """See the reference twin."""
    check_payload(x)
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(N, M, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(M, TILE_M), triton.cdiv(N, TILE_N))
    _transpose_kernel[grid](x, y, M, N, ALIGNED=M % 4 == 0, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=WARPS)
    return y
