"""Cast with block scales, along the rows of a matrix, along its columns, or both."""

import torch

from msamp.kernels.reference.amax import amax
from msamp.numerics.block_scale import by_name, quantize_blocks
from msamp.numerics.formats import of_dtype
from msamp.numerics.granularity import Block

SMALLEST, LARGEST = 16, 128  # columns of a block


def has_kernel(rows: int, columns: int) -> bool:
    """Whether `block_cast` supports these blocks: 1 x n or n x n, n a power of two from 16 to 128."""
    return SMALLEST <= columns <= LARGEST and not columns & (columns - 1) and rows in (1, columns)


def check_block_cast(x: torch.Tensor, rows: int, columns: int, scale_rule: str) -> None:
    """Raise a ValueError if `x` is not a matrix, the blocks have no kernel, or the rule is unknown."""
    if x.ndim != 2:
        raise ValueError(f"x is {tuple(x.shape)}; a cast with blocks requires [M, N]: flatten the tokens into M")
    if not has_kernel(rows, columns):
        raise ValueError(
            f"a block of {rows} x {columns} has no kernel; use 1 x n or n x n, n a power of two from {SMALLEST} to {LARGEST}, "
            "such as 1 x 128, 128 x 128 or 1 x 32"
        )
    by_name(scale_rule)


def new_operand(x: torch.Tensor, shape: tuple[int, int], block: Block, dtype: torch.dtype, scale_rule: str) -> list[torch.Tensor]:
    """Allocate payload and scale_inv for [M, N] in blocks, on the device of `x` and in the layout of `block_cast`."""
    (M, N), kind = block.scales_shape(shape), by_name(scale_rule).kept_dtype
    table = x.new_empty((N, M), dtype=kind).t() if block.rows == 1 else x.new_empty((M, N), dtype=kind)
    return [x.new_empty(shape, dtype=dtype), table]


def no_operand(x: torch.Tensor, dtype: torch.dtype, scale_rule: str) -> list[torch.Tensor]:
    """Return empty tensors for a layout that is not requested."""
    return [x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=by_name(scale_rule).kept_dtype)]


def block_cast(
    x: torch.Tensor,
    multiplier: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    *,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    scale_rule: str,
    row: bool,
    col: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast `x` with a just-in-time scale per block, its transpose, or both, in one read.

    The transpose is a cast of `x.t()` with blocks of the same shape. So blocks of one row run along the rows of `x` in one cast and along
    its columns in the other, and each is cast separately from `x`. Square blocks, and their codes, are the same in both.

    Args:
        x: [M, N] FP32, BF16, FP16 or FP8.
        multiplier: FP32, 0-dim: cast `x * multiplier` (in FP32), such as the payload of an FP16 or FP8 weight times its scale_inv.
        amax_slot: FP32, 0-dim, raised in place to the amax of the values (+inf if not finite); None does not measure it.
        rows, columns: of a block, 1 x n or n x n, n a power of two from 16 to 128; blocks at an edge may be short.
        dtype: an FP8 dtype.
        scale_rule: `fp32`, `power-of-two`, `e8m0` or `e8m0-up` of `msamp.numerics.block_scale`.
        row: return the cast of `x`.
        col: return the cast of its transpose.

    Returns:
        Payload [M, N] row-major of `dtype`; its scale_inv [ceil(M / rows), ceil(N / columns)], FP32 or (E8M0) uint8; and the same two of
        `x.t()`: [N, M], [ceil(N / rows), ceil(M / columns)]. Tables of blocks of one row are column-major and the others row-major, as
        Hopper's GEMM reads them (`msamp.kernels.scaled_mm.block_scaled_mm`). Results that are not requested are empty.

    Raises:
        ValueError: if the shape, the block or the rule is not supported.
    """
    check_block_cast(x, rows, columns, scale_rule)
    v, block = x.detach().float(), Block(rows, columns)
    if multiplier is not None:
        v = v * multiplier
    if amax_slot is not None:
        amax_slot.copy_(torch.maximum(amax_slot, amax(v)))
    out = []
    for asked, operand in ((row, v), (col, v.t())):
        if not asked:
            out += no_operand(x, dtype, scale_rule)
            continue
        payload, scale_inv = quantize_blocks(operand.contiguous(), block, of_dtype(dtype), scale_rule)
        stored = new_operand(x, (operand.shape[0], operand.shape[1]), block, dtype, scale_rule)
        out += [stored[0].copy_(payload), stored[1].copy_(scale_inv)]
    return out[0], out[1], out[2], out[3]
