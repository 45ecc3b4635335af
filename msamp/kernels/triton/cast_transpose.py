"""Cast with one scale to either layout or both, in one read of the input. Twin: `msamp.kernels.reference.cast_transpose`.

This file also contains the functions that every kernel with FP8 output uses. A thread processes four consecutive rows: the four codes of
a column form one 32-bit word before threads exchange them for the transpose (an exchange of single bytes costs more than the memory
traffic), and sums and amaxes are exchanged once per four rows.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.cast_transpose import check_asked
from msamp.kernels.triton.cast import _block_amax, _bytes, _fp8_code, _rounded, fp8_constants
from msamp.kernels.triton.pack import _value
from msamp.kernels.triton.scale_from_amax import _inverse, scale_from_amax, scale_from_maxima
from msamp.numerics.formats import of_dtype

TILE_M, TILE_N, WARPS = 128, 64, 4


@triton.jit
def _code(v, FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr):
    """`_fp8_code` without the sign of NaN: the conversion instruction saturates. It is in PTX for the reason given in `_words`."""
    if HARDWARE and MANTISSA == 3:
        code = tl.inline_asm_elementwise(
            "{ .reg .b16 l; cvt.rn.satfinite.e4m3x2.f32 l, 0f00000000, $1; cvt.u32.u16 $0, l; }",
            "=r,f", [v], dtype=tl.int32, is_pure=True, pack=1,
        ).to(tl.uint8)  # fmt: skip
    elif HARDWARE:
        code = tl.inline_asm_elementwise(
            "{ .reg .b16 l; cvt.rn.satfinite.e5m2x2.f32 l, 0f00000000, $1; cvt.u32.u16 $0, l; }",
            "=r,f", [v], dtype=tl.int32, is_pure=True, pack=1,
        ).to(tl.uint8)  # fmt: skip
    else:
        code = _fp8_code(v, FP8_MAX, MANTISSA, BIAS, HARDWARE)
    return code


@triton.jit
def _tile(quad, N, column, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return a tile of [M, N] starting at row 4 `quad` and at `column`, both int64: its quads of rows and its columns, the offset of its
    origin, and the offsets of the quads' first rows from there, in int32 since int64 would take twice the registers."""
    q, n = tl.arange(0, TILE_M // 4), tl.arange(0, TILE_N)
    return q, n, 4 * quad * N + column, (4 * q)[:, None] * N + n[None, :]


@triton.jit
def _load_rows(x, at, stride, q, left, columns):
    """Load four tiles from `x`, with 0 outside `left` rows and `columns`: the first rows of quads `q`, which start at `at`, and the three
    rows after each.

    All are loaded before any is used, since the compiler cannot move a load above a store.
    """
    x0 = tl.load(x + at, mask=(4 * q < left)[:, None] & columns[None, :], other=0.0)
    x1 = tl.load(x + stride + at, mask=(4 * q + 1 < left)[:, None] & columns[None, :], other=0.0)
    x2 = tl.load(x + 2 * stride + at, mask=(4 * q + 2 < left)[:, None] & columns[None, :], other=0.0)
    x3 = tl.load(x + 3 * stride + at, mask=(4 * q + 3 < left)[:, None] & columns[None, :], other=0.0)
    return x0, x1, x2, x3


@triton.jit
def _higher(top, v, WORDS: tl.constexpr = True):
    """The larger magnitude; NaN if either is NaN. `WORDS`: no transpose is stored byte by byte in the same kernel.

    Triton 3.8 stores wrong bytes in a transpose next to max.NaN on Hopper (triton-lang/triton#11111), but not next to a comparison.
    """
    v = tl.abs(v)
    return tl.maximum(top, v, propagate_nan=tl.PropagateNan.ALL) if WORDS else tl.where((top > v) | (top != top), top, v)


@triton.jit
def _words(values, scale, FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr):
    """Pack the codes of four FP32 tiles into the bytes of one int32 tile, the first tile's code lowest.

    One piece of PTX converts and packs: words assembled from 8-bit codes that are also stored were wrong (H200, Triton 3.6: three of four
    bytes of the transpose in a cast with both layouts, in both formats).
    """
    a, b, c, d = values[0] * scale, values[1] * scale, values[2] * scale, values[3] * scale
    if not HARDWARE:
        low = _fp8_code(a, FP8_MAX, MANTISSA, BIAS, False).to(tl.int32) | (_fp8_code(b, FP8_MAX, MANTISSA, BIAS, False).to(tl.int32) << 8)
        high = _fp8_code(c, FP8_MAX, MANTISSA, BIAS, False).to(tl.int32) | (_fp8_code(d, FP8_MAX, MANTISSA, BIAS, False).to(tl.int32) << 8)
        words = low | (high << 16)
    elif MANTISSA == 3:
        words = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, $2, $1; cvt.rn.satfinite.e5m2x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def _put(
    values, y, y_t, origin, quad, column, at, stride, q, n, M, left, columns, scale,
    ALIGNED: tl.constexpr, FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast and store four FP32 tiles, the first rows of quads `q` and the three rows after each. In `y` they start at `origin + at`, with
    `stride` between rows. In `y_t` the tile starts at `quad` and `column` (int64), with quads `q` and columns `n` from there.

    `y` or `y_t` may be None. With MANTISSA 0, values are stored plain, and only in `y`.
    """
    if MANTISSA == 0:
        for k in tl.static_range(4):
            inside = (4 * q + k < left)[:, None] & columns[None, :]
            tl.store(y + (origin + k * stride) + at, _rounded(values[k], y.dtype.element_ty, HARDWARE), mask=inside)
    else:
        words = _words(values, scale, FP8_MAX, MANTISSA, BIAS, HARDWARE)
        if y is not None:
            codes = y.to(tl.pointer_type(tl.uint8), bitcast=True) + origin
            for k in tl.static_range(4):
                inside = (4 * q + k < left)[:, None] & columns[None, :]
                tl.store(codes + k * stride + at, (words >> (8 * k)).to(tl.uint8), mask=inside)
        if y_t is not None:
            _put_transposed(words, y_t, quad, column, q, n, M, left, columns, ALIGNED)


@triton.jit
def _put_transposed(words, y_t, quad, column, q, n, M, left, columns, ALIGNED: tl.constexpr):
    """Store `words` of four rows each to the transpose [N, M], at quads `q` after `quad` and columns `n` after `column`."""
    if ALIGNED:
        inside = columns[:, None] & (q < left // 4)[None, :]
        at = n[:, None] * (M // 4) + q[None, :]
        tl.store(y_t.to(tl.pointer_type(tl.int32), bitcast=True) + (column * (M // 4) + quad) + at, tl.trans(words), mask=inside)
    else:
        codes = y_t.to(tl.pointer_type(tl.uint8), bitcast=True) + (column * M + 4 * quad)
        for k in tl.static_range(4):
            inside = (4 * q + k < left)[:, None] & columns[None, :]
            tl.store(codes + (4 * q + k)[:, None] + n[None, :] * M, (words >> (8 * k)).to(tl.uint8), mask=inside)


@triton.jit
def _put_sums(total, sums, column, n, N, columns):
    """Store the column sums of a tile, starting at `column`, to the row of `sums` [tiles, N] for the program's tokens."""
    if sums is not None:
        tl.store(sums + (tl.program_id(0).to(tl.int64) * N + column) + n, tl.sum(total, 0), mask=columns)


@triton.jit
def _tell(top, scale, amax, scale_inv):
    """Raise `amax` to the maximum of `top`, and store 1 / scale in `scale_inv`, or NaN if any program's `top` is not finite.

    Both use integer maxima: the bits of non-negative floats have the order of the floats, with NaN above all.
    """
    highest = _block_amax(top)
    if amax is not None:
        tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), highest.to(tl.int32, bitcast=True), sem="relaxed")
    if scale_inv is not None:
        finite = highest < float("inf")
        bits = tl.where(finite, _inverse(scale).to(tl.int32, bitcast=True), 0x7FC00000)
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        tl.atomic_max(scale_inv.to(tl.pointer_type(tl.int32), bitcast=True), bits, mask=first | (finite == 0), sem="relaxed")


@triton.jit
def _cast_transpose_kernel(
    x, y, y_t, sums, scale, amax, scale_inv, M, N,
    INVERSE: tl.constexpr, ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    quad, column = tl.program_id(0).to(tl.int64) * (TILE_M // 4), tl.program_id(1).to(tl.int64) * TILE_N
    q, n, origin, at = _tile(quad, N, column, TILE_M, TILE_N)
    left, columns = (M - 4 * quad).to(tl.int32), n < (N - column).to(tl.int32)
    tiles = _load_rows(x + origin, at, N, q, left, columns)
    f = 1.0
    if scale is not None:
        f = tl.load(scale)
        if INVERSE:
            f = _inverse(f)
    top = tl.zeros((TILE_M // 4, TILE_N), tl.float32)
    total = top
    values = ()
    for k in tl.static_range(4):
        v = tiles[k].to(tl.float32)
        top, total = _higher(top, v, ALIGNED), total + v
        values = values + (v,)  # noqa: RUF005  # Triton unpacks no tuple into another
    if scale is not None:
        _put(values, y, y_t, origin, quad, column, at, N, q, n, M, left, columns, f, ALIGNED, FP8_MAX, MANTISSA, BIAS, HARDWARE)
        _put_sums(total, sums, column, n, N, columns)
    _tell(top, f, amax, scale_inv)


def _quantise(
    launch: Callable[[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], None],
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    scale_inv_slot: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    maxima: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a kernel with (scale, amax, scale_inv), and return scale_inv, empty if a slot is given. For a just-in-time scale without
    `maxima` it runs twice.

    Without a scale, a kernel only measures the amax and stores nothing; for a wide dtype it gets none of the three.
    """
    if dtype.itemsize > 1:
        launch(None, None, None)
        return torch.empty(0, dtype=torch.float32, device=device)
    if scale is None and maxima is not None:
        scale = scale_from_maxima(maxima, of_dtype(dtype).max)
    elif scale is None:
        amax = torch.zeros((), dtype=torch.float32, device=device)
        launch(None, amax, None)
        scale = scale_from_amax(amax, of_dtype(dtype).max, None, 1.0)
    scale_inv = torch.zeros((), dtype=torch.float32, device=device) if scale_inv_slot is None else scale_inv_slot
    launch(scale, amax_slot, scale_inv)
    return scale_inv if scale_inv_slot is None else nothing(torch.float32, device)


@functools.cache
def _kept_nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor [0] for a result that is not requested. It is cached, since allocating it costs the host as much as any other
    allocation, except under autograd, which marks an operator's results."""
    return torch.empty(0, dtype=dtype, device=device) if torch.is_grad_enabled() else _kept_nothing(dtype, device)


def _layouts(M: int, N: int, row: bool, col: bool, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate [M, N] and its transpose, empty if not requested."""
    y = torch.empty((M, N), dtype=dtype, device=device) if row else nothing(dtype, device)
    return y, torch.empty((N, M), dtype=dtype, device=device) if col else nothing(dtype, device)


def _partial_sums(asked: bool, tiles: int, N: int, device: torch.device) -> torch.Tensor:
    """Allocate the column sums of every row tile, for `sum_parts`; empty if not requested."""
    return torch.empty((tiles, N), dtype=torch.float32, device=device) if asked else nothing(torch.float32, device)


def parts(M: int) -> int:
    """Return the number of parts in the column sums of M rows."""
    return max(1, -(-M // TILE_M))


def cast_transpose(x, scale, amax_slot, dtype, *, row=False, col=False, colsum=False, scale_inv_slot=None, maxima=None):
    """See the reference twin."""
    check_asked(row=row, col=col, colsum=colsum)
    x = x.contiguous()
    M, N = x.shape
    grid = (parts(M), max(1, -(-N // TILE_N)))
    y, y_t = _layouts(M, N, row, col, dtype, x.device)
    partial = _partial_sums(colsum, grid[0], N, x.device)
    constants = fp8_constants(dtype, x.device)

    def launch(scale: torch.Tensor | None, amax: torch.Tensor | None, scale_inv: torch.Tensor | None) -> None:
        _cast_transpose_kernel[grid](
            x, y if row else None, y_t if col else None, partial if colsum else None, scale, amax, scale_inv, M, N,
            INVERSE=False, ALIGNED=M % 4 == 0, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=WARPS, **constants,
        )  # fmt: skip

    return y, y_t, _quantise(launch, scale, amax_slot, scale_inv_slot, dtype, x.device, maxima), partial


def cast_transposed(x, scale_inv, dtype):
    """See the reference twin."""
    x = x.contiguous()
    M, N = x.shape
    y_t = torch.empty(N, M, dtype=dtype, device=x.device)
    _cast_transpose_kernel[-(-M // TILE_M), -(-N // TILE_N)](
        x, None, y_t, None, scale_inv, None, None, M, N,
        INVERSE=True, ALIGNED=M % 4 == 0, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=WARPS, **fp8_constants(dtype, x.device),
    )  # fmt: skip
    return y_t


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
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(N, M, dtype=x.dtype, device=x.device)
    grid = (-(-M // 128), -(-N // 128))
    _transpose_kernel[grid](x, y, M, N, ALIGNED=M % 4 == 0, TILE_M=128, TILE_N=128, num_warps=WARPS)
    return y


@triton.jit
def _cast_columns_kernel(
    x, y, scale, channel_scale, M, N,
    SOURCE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * TILE_M, tl.program_id(1).to(tl.int64) * TILE_N
    m, n = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    columns = n < (N - column).to(tl.int32)
    inside = (m < (M - row).to(tl.int32))[:, None] & columns[None, :]
    at = row * N + column + m.to(tl.int64)[:, None] * N + n[None, :]
    factor = _inverse(tl.load(channel_scale + column + n, mask=columns, other=1.0))
    if scale is not None:
        factor = factor * tl.load(scale)
    v = _value(tl.load(x + at, mask=inside, other=0), SOURCE, HARDWARE) * factor[None, :]
    if MANTISSA > 0:
        tl.store(y + at, _fp8_code(v, FP8_MAX, MANTISSA, BIAS, HARDWARE), mask=inside)
    else:
        tl.store(y + at, v, mask=inside)


def cast_columns(x, scale, channel_scale, dtype):
    """See the reference twin."""
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    if x.numel():
        _cast_columns_kernel[-(-M // 16), -(-N // 512)](
            _bytes(x), _bytes(y), scale, channel_scale.contiguous(), M, N,
            SOURCE=of_dtype(x.dtype).mantissa_bits, TILE_M=16, TILE_N=512, num_warps=8, **fp8_constants(dtype, x.device),
        )  # fmt: skip
    return y
