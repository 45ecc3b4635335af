"""Copy FP8 rows to their experts in both layouts, and add up the rows of a token. Twin: `msamp.kernels.reference.permute`.

Both are bound by memory: `permute` reads one byte per element and writes one per layout, `unpermute` reads the rows of all choices once and
writes one row per token. The transpose packs four rows of a column in a word, as in `cast_transpose`.
"""

import torch
import triton
import triton.language as tl

from msamp.kernels.triton.cast import _rounded
from msamp.kernels.triton.cast_transpose import _layouts, _put_transposed

TILE_M, TILE_N, WARPS = 128, 128, 4  # with the transpose
ROWS, COLUMNS = 8, 1024  # without it
TOKENS, SUMMED = 4, 512


@triton.jit
def _copy_rows_kernel(x, source, end, y, M, N, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if end is not None:  # noqa: SIM102  one condition is of the compiler, one of the device
        if tl.program_id(0) * ROWS >= tl.load(end):
            return
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pair = tl.load(source + r, mask=r < M, other=-1)
    inside = (n < N)[None, :]
    row = (pair // TOP_K).to(tl.int64) * N
    codes = tl.load(x + row[:, None] + n[None, :], mask=(pair >= 0)[:, None] & inside, other=0)
    tl.store(y + r.to(tl.int64)[:, None] * N + n[None, :], codes, mask=(r < M)[:, None] & inside)


@triton.jit
def _row_of(x, source, y, r, n, M, N, columns, TOP_K: tl.constexpr):
    """Load the codes (int32) of rows `r` in columns `n`, and store them to `y` too, unless it is None."""
    pair = tl.load(source + r, mask=r < M, other=-1)
    row = (pair // TOP_K).to(tl.int64) * N
    codes = tl.load(x + row[:, None] + n[None, :], mask=(pair >= 0)[:, None] & columns[None, :], other=0)
    if y is not None:
        tl.store(y + r.to(tl.int64)[:, None] * N + n[None, :], codes, mask=(r < M)[:, None] & columns[None, :])
    return codes.to(tl.int32)


@triton.jit
def _permute_kernel(
    x, source, end, y, y_t, M, N, TOP_K: tl.constexpr, ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):  # fmt: skip
    quad, column = tl.program_id(0).to(tl.int64) * (TILE_M // 4), tl.program_id(1).to(tl.int64) * TILE_N
    if end is not None:  # noqa: SIM102  one condition is of the compiler, one of the device
        if 4 * quad >= tl.load(end):
            return
    q, n = tl.arange(0, TILE_M // 4), tl.arange(0, TILE_N)
    left, columns = (M - 4 * quad).to(tl.int32), n < (N - column).to(tl.int32)
    first, at = (4 * quad).to(tl.int32) + 4 * q, column + n
    x0 = _row_of(x, source, y, first, at, M, N, columns, TOP_K)
    x1 = _row_of(x, source, y, first + 1, at, M, N, columns, TOP_K)
    x2 = _row_of(x, source, y, first + 2, at, M, N, columns, TOP_K)
    x3 = _row_of(x, source, y, first + 3, at, M, N, columns, TOP_K)
    words = x0 | (x1 << 8) | (x2 << 16) | (x3 << 24)
    _put_transposed(words, y_t, quad, column, q, n, M, left, columns, ALIGNED)


@triton.jit
def _unpermute_kernel(y, places, out, T, N, TOP_K: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr):
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (t < T)[:, None] & (n < N)[None, :]
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(places + t * TOP_K + choice, mask=t < T, other=-1).to(tl.int64)
        total += tl.load(y + row[:, None] * N + n[None, :], mask=inside & (row >= 0)[:, None], other=0.0).to(tl.float32)
    tl.store(out + t.to(tl.int64)[:, None] * N + n[None, :], _rounded(total, out.dtype.element_ty, HARDWARE), mask=inside)


def permute(x, source, top_k, *, row=False, col=False, end=None):
    """See the reference twin."""
    x = x.contiguous()
    M, N = source.shape[0], x.shape[1]
    y, y_t = _layouts(M, N, row, col, x.dtype, x.device)
    codes, rows = x.view(torch.uint8), y.view(torch.uint8)
    if not (M and N):
        return y, y_t
    if col:
        grid = (-(-M // TILE_M), -(-N // TILE_N))
        _permute_kernel[grid](
            codes, source, end, rows if row else None, y_t, M, N, TOP_K=top_k, ALIGNED=M % 4 == 0, TILE_M=TILE_M, TILE_N=TILE_N,
            num_warps=WARPS,
        )  # fmt: skip
    elif row:
        grid = (-(-M // ROWS), -(-N // COLUMNS))
        _copy_rows_kernel[grid](codes, source, end, rows, M, N, TOP_K=top_k, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return y, y_t


def unpermute(y, places):
    """See the reference twin."""
    y = y.contiguous()
    (T, top_k), N = places.shape, y.shape[1]
    out = torch.empty((T, N), dtype=y.dtype, device=y.device)
    if out.numel():
        grid = (-(-T // TOKENS), -(-N // SUMMED))
        _unpermute_kernel[grid](
            y, places, out, T, N, TOP_K=top_k, TOKENS=TOKENS, COLUMNS=SUMMED, HARDWARE=y.device.type == "cuda", num_warps=WARPS
        )
    return out
