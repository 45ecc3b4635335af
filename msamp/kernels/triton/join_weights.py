"""Join stored weights into one FP8 operand, in one launch. Twin: `msamp.kernels.reference.join_weights`."""

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.cast_transpose import check_rows
from msamp.kernels.triton.cast import fp8_constants
from msamp.kernels.triton.cast_transpose import _inverse, _load_rows, _put, _tile
from msamp.kernels.triton.pack import _value

TILE_M, TILE_N, WARPS = 128, 64, 4
WIDE = 23  # stands for the mantissa of a payload that is not in FP8, and read as it is


@triton.jit
def _join_weights_kernel(
    payloads, multipliers, scale_invs, rows, y, y_t, scale_inv, M, N,
    COUNT: tl.constexpr, FROM: tl.constexpr, ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    common = tl.load(scale_invs[0])
    for i in tl.static_range(1, COUNT):
        common = tl.maximum(common, tl.load(scale_invs[i]), propagate_nan=tl.PropagateNan.ALL)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, common)
    tile, column = tl.program_id(0), tl.program_id(1).to(tl.int64) * TILE_N
    first = tl.zeros((), tl.int64)
    for i in tl.static_range(COUNT):
        if (tile >= 0) & (tile < tl.cdiv(rows[i], TILE_M)):
            quad = tile.to(tl.int64) * (TILE_M // 4)
            q, n, origin, at = _tile(quad, N, column, TILE_M, TILE_N)
            left, columns = (rows[i] - 4 * quad).to(tl.int32), n < (N - column).to(tl.int32)
            factor = tl.load(scale_invs[i]) * _inverse(common)
            if FROM > 3:
                factor = factor * tl.load(multipliers[i])
            tiles = _load_rows(payloads[i] + origin, at, N, q, left, columns)
            values = ()
            for k in tl.static_range(4):
                values = values + (_value(tiles[k], FROM, HARDWARE),)  # noqa: RUF005
            _put(
                values, y, y_t, origin + first * N, quad + first // 4, column, at, N, q, n, M, left, columns, factor,
                ALIGNED, FP8_MAX, MANTISSA, BIAS, HARDWARE,
            )  # fmt: skip
        tile -= tl.cdiv(rows[i], TILE_M)
        first += rows[i]


def join_weights(payloads, multipliers, scale_invs, dtype, *, transpose=False):
    """See the reference twin."""
    for payload in payloads:
        check_rows(payload.shape[0])
    rows = tuple(x.shape[0] for x in payloads)
    M, N, device = sum(rows), payloads[0].shape[1], payloads[0].device
    y = torch.empty((N, M) if transpose else (M, N), dtype=dtype, device=device)
    scale_inv = torch.empty((), dtype=torch.float32, device=device)
    stored, constants = payloads[0].dtype == dtype, fp8_constants(dtype, device)
    xs = tuple(x.contiguous().view(torch.uint8) if stored else x.contiguous() for x in payloads)
    grid = (sum(-(-count // TILE_M) for count in rows), -(-N // TILE_N))
    _join_weights_kernel[grid](
        xs, tuple(multipliers), tuple(scale_invs), rows, None if transpose else y, y if transpose else None, scale_inv, M, N,
        COUNT=len(xs), FROM=constants["MANTISSA"] if stored else WIDE, ALIGNED=True, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=WARPS,
        **constants,
    )  # fmt: skip
    return y, scale_inv
