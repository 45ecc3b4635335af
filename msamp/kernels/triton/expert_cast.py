"""Cast the weights of all experts in both layouts, in three launches for any number of them. Twin: `msamp.kernels.reference.expert_cast`.

The first launch writes the amax of every part of every expert, the second the experts' scales, and the third reads the weights once more
and writes both layouts. Weights that are stored in FP8 are only transposed, by the third.
"""

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.cast_transpose import check_rows
from msamp.kernels.triton.cast import _block_amax, fp8_constants
from msamp.kernels.triton.cast_transpose import _load_rows, _put, _put_transposed, _tile
from msamp.kernels.triton.scale_from_amax import _weight_scales_kernel
from msamp.numerics.formats import of_dtype
from msamp.numerics.scaling import _fields

BLOCK, MANY = 8192, 1024  # elements per program of the first launch, maxima read at a time by the second
TILE_M, TILE_N, WARPS = 128, 64, 4


@triton.jit
def _expert_amax_kernel(x, maxima, numel, BLOCK: tl.constexpr):
    expert, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + expert * numel + at, mask=at < numel, other=0.0).to(tl.float32)
    tl.store(maxima + expert * tl.num_programs(0) + part, _block_amax(v))


@triton.jit
def _expert_cast_kernel(
    x, y, y_t, multipliers, N, K, STORED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    quad, column = tl.program_id(0).to(tl.int64) * (TILE_M // 4), tl.program_id(1).to(tl.int64) * TILE_N
    q, n, origin, at = _tile(quad, K, column, TILE_M, TILE_N)
    left, columns = (N - 4 * quad).to(tl.int32), n < (K - column).to(tl.int32)
    own = expert * N * K
    x0, x1, x2, x3 = _load_rows(x + own + origin, at, K, q, left, columns)
    if STORED:
        words = x0.to(tl.int32) | (x1.to(tl.int32) << 8) | (x2.to(tl.int32) << 16) | (x3.to(tl.int32) << 24)
        _put_transposed(words, y_t + own, quad, column, q, n, N, left, columns, True)
    else:
        values = (x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32))
        f = tl.load(multipliers + expert)
        _put(
            values, y + own, y_t + own, origin, quad, column, at, K, q, n, N, left, columns, f,
            True, FP8_MAX, MANTISSA, BIAS, HARDWARE,
        )  # fmt: skip


def expert_cast(payload, stored, dtype):
    """See the reference twin."""
    check_rows(payload.shape[1])
    payload, kept = payload.contiguous(), payload.dtype == dtype
    (E, N, K), device = payload.shape, payload.device
    y_t = torch.empty((E, K, N), dtype=dtype, device=device)
    y = torch.empty(0 if kept else (E, N, K), dtype=dtype, device=device)
    multipliers, scale_invs = stored, stored.clone() if kept else torch.empty_like(stored)
    if not kept:
        parts = max(1, -(-N * K // BLOCK))
        maxima, multipliers = torch.empty((E, parts), dtype=torch.float32, device=device), torch.empty_like(stored)
        if E:
            exponent, mantissa = _fields(of_dtype(dtype).max)
            _expert_amax_kernel[parts, E](payload, maxima, N * K, BLOCK=BLOCK, num_warps=8)
            _weight_scales_kernel[E,](
                maxima, stored.contiguous(), multipliers, scale_invs, parts, EXPONENT=exponent, MANTISSA=mantissa, BLOCK=MANY, num_warps=4
            )
    if payload.numel():
        source = payload.view(torch.uint8) if kept else payload
        _expert_cast_kernel[-(-N // TILE_M), -(-K // TILE_N), E](
            source, y, y_t, multipliers, N, K, STORED=kept, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=WARPS,
            **fp8_constants(dtype, device),
        )  # fmt: skip
    return y, y_t, scale_invs
