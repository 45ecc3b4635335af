"""Cast with block scales, along rows, along columns, or both, in one read of the input. Twin: `msamp.kernels.reference.block_cast`.

A tile of 128 x 128 contains all of every block that starts in it, in both directions, so amax, scale and both casts of an element need only
one read. Each thread has groups of four rows, as in `cast_transpose`.
"""

import triton
import triton.language as tl

from msamp.kernels.reference.block_cast import check_block_cast, new_operand, no_operand
from msamp.kernels.triton.cast import _bytes, fp8_constants
from msamp.kernels.triton.cast_transpose import _code, _load_rows, _put, _tell, _tile
from msamp.kernels.triton.group_cast import _group_exponent, _group_scale_inv
from msamp.kernels.triton.pack import _value
from msamp.numerics.formats import of_dtype
from msamp.numerics.granularity import Block
from msamp.numerics.scaling import SMALLEST, _fields

TILE, WARPS = 128, 8
REGISTERS = 128  # per thread, so that two programs fit on a multiprocessor and overlap loads and stores; the default is up to 214


@triton.jit
def _magnitude(v):
    """|v|, with NaN replaced by infinity, since a maximum ignores NaN."""
    return tl.where(v == v, tl.abs(v), float("inf"))


@triton.jit
def _max_of_columns(v, SIZE: tl.constexpr):
    """[R, C] -> [R, C / SIZE]: the maximum of every SIZE columns."""
    return tl.max(v, 1)[:, None] if v.shape[1] == SIZE else tl.max(tl.reshape(v, [v.shape[0], v.shape[1] // SIZE, SIZE]), 2)


@triton.jit
def _max_of_rows(v, SIZE: tl.constexpr):
    """[R, C] -> [R / SIZE, C]: the maximum of every SIZE rows."""
    return tl.max(v, 0)[None, :] if v.shape[0] == SIZE else tl.max(tl.reshape(v, [v.shape[0] // SIZE, SIZE, v.shape[1]]), 1)


@triton.jit
def _over_columns(v, SIZE: tl.constexpr):
    """[R, B] -> [R, B SIZE], repeating every value SIZE times; if B is 1, `v` itself, which broadcasts."""
    if v.shape[1] > 1:
        v = tl.reshape(tl.broadcast_to(v[:, :, None], [v.shape[0], v.shape[1], SIZE]), [v.shape[0], v.shape[1] * SIZE])
    return v


@triton.jit
def _over_rows(v, SIZE: tl.constexpr):
    """[B, C] -> [B SIZE, C], repeating every value SIZE times; if B is 1, `v` itself, which broadcasts."""
    if v.shape[0] > 1:
        v = tl.reshape(tl.broadcast_to(v[:, None, :], [v.shape[0], SIZE, v.shape[1]]), [v.shape[0] * SIZE, v.shape[1]])
    return v


@triton.jit
def _scales(
    amax, RULE: tl.constexpr, EXPONENT: tl.constexpr, LIMIT: tl.constexpr, FP8_MAX: tl.constexpr, SMALLEST_AMAX: tl.constexpr
):  # fmt: skip
    """Return scale and stored scale_inv of blocks with these maxima, by one of `msamp.numerics.block_scale.RULES`."""
    finite = amax < float("inf")
    if RULE == "fp32":
        scale_inv = tl.div_rn(tl.maximum(amax, SMALLEST_AMAX), FP8_MAX)
        scale_inv = tl.where(amax == 0.0, 1.0, scale_inv)
        scale = tl.where(finite, tl.div_rn(1.0, scale_inv), 1.0)
        kept = tl.where(finite, scale_inv, _group_scale_inv(tl.full(amax.shape, 255, tl.int32)))
    elif RULE == "power-of-two":
        exponent = _group_exponent(amax, EXPONENT, LIMIT)
        kept = _group_scale_inv(exponent)
        scale = tl.where(finite, ((254 - exponent) << 23).to(tl.float32, bitcast=True), 1.0)
    else:
        bits = amax.to(tl.int32, bitcast=True)
        code = (bits >> 23) - (EXPONENT - 127)
        if RULE == "e8m0-up":
            code += ((bits & 0x7FFFFF) > LIMIT).to(tl.int32)
        code = tl.maximum(code, 0)
        scale = tl.where(finite, ((254 - code) << 23).to(tl.float32, bitcast=True), 1.0)
        kept = tl.where(finite, code, 255).to(tl.uint8)
    return scale, kept


@triton.jit
def _store_table(table, kept, row, column, rows, columns, row_stride, column_stride):
    """Store `kept` to `table` [rows, columns] at int64 `row`s and `column`s."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(table + row[:, None] * row_stride + column[None, :] * column_stride, kept, mask=inside)


@triton.jit
def _block_cast_kernel(
    x, multiplier, amax, y, table, y_t, table_t, M, N,
    SOURCE: tl.constexpr, SQUARE: tl.constexpr, COLUMNS: tl.constexpr, RULE: tl.constexpr, EXPONENT: tl.constexpr, LIMIT: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    quad, column = tl.program_id(0).to(tl.int64) * (TILE // 4), tl.program_id(1).to(tl.int64) * TILE
    q, n, origin, at = _tile(quad, N, column, TILE, TILE)
    left, columns = (M - 4 * quad).to(tl.int32), n < (N - column).to(tl.int32)
    tiles = _load_rows(x + origin, at, N, q, left, columns)
    values = ()
    top = tl.zeros((TILE // 4, TILE), tl.float32)
    for k in tl.static_range(4):
        v = _value(tiles[k], SOURCE, HARDWARE)
        if multiplier is not None:
            v = v * tl.load(multiplier)
        values = values + (v,)  # noqa: RUF005  # Triton unpacks no tuple into another
        top = tl.maximum(top, _magnitude(v))
    blocks = tl.arange(0, TILE // COLUMNS)  # indices of the tile's blocks, down and across
    down, across = 4 * quad // COLUMNS + blocks, column // COLUMNS + blocks
    M_BLOCKS, N_BLOCKS = tl.cdiv(M, COLUMNS), tl.cdiv(N, COLUMNS)
    if SQUARE:
        largest = _max_of_columns(_max_of_rows(top, COLUMNS // 4), COLUMNS)
        scale, kept = _scales(largest, RULE, EXPONENT, LIMIT, FP8_MAX, SMALLEST_AMAX)
        spread = _over_columns(_over_rows(scale, COLUMNS // 4), COLUMNS)
        _put(values, y, y_t, origin, quad, column, at, N, q, n, M, left, columns, spread, ALIGNED, FP8_MAX, MANTISSA, BIAS, HARDWARE)
        if y is not None:
            _store_table(table, kept, down, across, M_BLOCKS, N_BLOCKS, N_BLOCKS, 1)
        if y_t is not None:
            _store_table(table_t, kept, down, across, M_BLOCKS, N_BLOCKS, 1, M_BLOCKS)
    else:
        if y is not None:
            codes = y.to(tl.pointer_type(tl.uint8), bitcast=True) + origin
            for k in tl.static_range(4):
                scale, kept = _scales(_max_of_columns(_magnitude(values[k]), COLUMNS), RULE, EXPONENT, LIMIT, FP8_MAX, SMALLEST_AMAX)
                code = _code(values[k] * _over_columns(scale, COLUMNS), FP8_MAX, MANTISSA, BIAS, HARDWARE)
                tl.store(codes + k * N + at, code, mask=(4 * q + k < left)[:, None] & columns[None, :])
                _store_table(table, kept, 4 * (quad + q) + k, across, M, N_BLOCKS, 1, M)
        if y_t is not None:
            scale, kept = _scales(_max_of_rows(top, COLUMNS // 4), RULE, EXPONENT, LIMIT, FP8_MAX, SMALLEST_AMAX)
            spread = _over_rows(scale, COLUMNS // 4)
            _put(values, None, y_t, origin, quad, column, at, N, q, n, M, left, columns, spread, ALIGNED, FP8_MAX, MANTISSA, BIAS, HARDWARE)
            _store_table(table_t, kept, down, column + n, M_BLOCKS, N, N, 1)
    if amax is not None:
        _tell(top, 1.0, amax, None)


def block_cast(x, multiplier, amax_slot, *, rows, columns, dtype, scale_rule, row, col):
    """See the reference twin."""
    check_block_cast(x, rows, columns, scale_rule)
    x = x.contiguous()
    (M, N), fmt = x.shape, of_dtype(dtype)
    block = Block(rows, columns)
    y, table = new_operand(x, (M, N), block, dtype, scale_rule) if row else no_operand(x, dtype, scale_rule)
    y_t, table_t = new_operand(x, (N, M), block, dtype, scale_rule) if col else no_operand(x, dtype, scale_rule)
    exponent, limit = _fields(fmt.max)
    if x.numel():
        _block_cast_kernel[-(-M // TILE), -(-N // TILE)](
            _bytes(x), multiplier, amax_slot, y if row else None, table if row else None, y_t if col else None, table_t if col else None,
            M, N, SOURCE=of_dtype(x.dtype).mantissa_bits, SQUARE=rows > 1, COLUMNS=columns, RULE=scale_rule, EXPONENT=exponent, LIMIT=limit,
            SMALLEST_AMAX=fmt.max * SMALLEST, ALIGNED=M % 4 == 0, TILE=TILE, num_warps=WARPS, maxnreg=REGISTERS,
            **fp8_constants(dtype, x.device),
        )  # fmt: skip
    return y, table, y_t, table_t
