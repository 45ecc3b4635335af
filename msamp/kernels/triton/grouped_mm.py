"""Grouped FP8 GEMMs for Hopper: one launch multiplies every expert's rows by its weight. Twin: `msamp.kernels.reference.grouped_mm`.

A mixture of experts sends each token to a few of E experts. Its rows are sorted by expert, and expert e owns the rows from `offsets[e - 1]`
to `offsets[e]`. Only the device knows these offsets: reading them on the host would stop the host in every layer, and a CUDA graph could
not be captured. So the grid must not depend on them.

The three products of an expert layer with M rows in total, weights [E, N, K], one byte per operand and two per result:

    product       for each expert         FLOPs     bytes that must move
    output        x_e [K] w_e^T           2 M N K   M K + E N K + 2 M N
    grad_input    g_e [N] w_e             2 M N K   M N + E N K + 2 M K
    grad_weight   g_e^T x_e [rows of e]   2 M N K   M N + M K + 2 E N K

With many small experts the bytes matter as much as the FLOPs. 128 experts of 768 x 2048 with 65,536 rows are 206 GFLOP, 0.15 ms at the rate
of a dense FP8 GEMM on an H100, and 0.52 GB, 0.17 ms at its copy bandwidth. A product is therefore worth its time only if nothing is read
twice from memory: the L2 cache must hold what neighbouring tiles share.

How a launch is divided. Programs are persistent, one per multiprocessor, and step through the tiles of the output. For output and
grad_input, `grouped_tiles` first lists the tiles of all experts (expert, first row, end), and a program looks its tile up in that list. An
expert whose rows do not fill its last tile costs a partly empty tile, and an expert without rows costs nothing. Rows beyond the last
expert's, three of four where four ranks share the experts, have no tiles and are not written. For grad_weight every expert has the same
number of tiles, and the sum over its rows has another length. `group` rows of tiles are passed through column by column, so that the
programs that run at the same time share operands.

Which layout the operands have. Hopper multiplies FP8 only if the summed dimension comes last in memory (K-major). grad_input sums over the
outputs and needs each weight transposed, [E, K, N]; grad_weight sums over rows and needs both operands transposed, [N, M] and [K, M]. The
kernels that write FP8 write these copies in the same pass. In the transposed operands a group begins at a column. The copy engine loads
only from columns whose address is a multiple of 16 bytes, so groups are padded to `GROUP_ALIGNMENT` rows of zeros (`aligned=True`). Padding
is built on the device, by `group_tokens`. Without it the kernel masks single bytes and is slow, but right.

Why full accumulation is harder. Hopper's tensor cores add FP8 products with about 13 bits of mantissa. With fast accumulation, a tile's sum
stays in the tensor cores. With full accumulation they sum one block of 128 elements, which is then added to an FP32 total, and meanwhile
they are idle. So two programs share a multiprocessor: while one adds, the other one multiplies. For that, a thread may use 128 registers,
too few for the total and a block's sums of a tile of 128 x 128. The tile is summed in two halves that share the left operand (`halves_n`).
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from msamp.kernels.reference import grouped_mm as _twin
from msamp.kernels.reference.grouped_mm import tile_capacity
from msamp.kernels.scaled_mm import blockwise_hardware, fp8_hardware
from msamp.kernels.triton.cast import _rounded

SLOTS = 128  # entries of the schedule per program


class Tiling(NamedTuple):
    """How a product is divided.

    Attributes:
        block_m, block_n: rows and columns of an output tile.
        block_k: elements of the summed dimension per iteration.
        warps: per program; four are one warpgroup.
        stages: blocks in flight from memory.
        group: tiles along M that are computed before the next column of tiles, so that they share operands in the L2 cache.
        tma: load by the copy engine, where the operands' alignment allows; otherwise by pointers.
        halves_m, halves_n: 2 sums two halves of a tile's rows or columns one after the other: full accumulation needs registers for one
            block's sums next to the total, and for half a tile there are enough.
        programs: per multiprocessor.
        flatten: fuse the loops over tiles and over K.
        maxnreg: registers per thread at most; None leaves the number to the compiler.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 128
    warps: int = 8
    stages: int = 3
    group: int = 16
    tma: bool = True
    halves_m: int = 1
    halves_n: int = 1
    programs: int = 1
    flatten: bool = False
    maxnreg: int | None = None


@triton.jit
def _grouped_tiles_kernel(offsets, table, rows, E, capacity, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr):
    """Find the expert of SLOTS tiles by comparing them with the running number of tiles before each expert."""
    e = tl.arange(0, EXPERTS)
    ends = tl.minimum(tl.load(offsets + e, mask=e < E, other=0), rows)
    starts = tl.minimum(tl.load(offsets + e - 1, mask=(e > 0) & (e < E), other=0), rows)
    tiles = (ends - starts + BLOCK - 1) // BLOCK
    after = tl.cumsum(tiles, 0)
    count = tl.sum(tiles, 0)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    passed = after[None, :] <= slot[:, None]  # experts whose tiles all come before the slot
    expert = tl.sum(passed.to(tl.int32), 1)
    own = e[None, :] == expert[:, None]
    first = tl.sum(tl.where(own, starts[None, :] - (after - tiles)[None, :] * BLOCK, 0), 1) + slot * BLOCK
    end = tl.sum(tl.where(own, ends[None, :], 0), 1)
    used = slot < count
    inside = slot < capacity
    tl.store(table + slot, tl.where(used, expert, 0), mask=inside)
    tl.store(table + capacity + slot, tl.where(used, first, 0), mask=inside)
    tl.store(table + 2 * capacity + slot, tl.where(used, end, 0), mask=inside)
    tl.store(table + 3 * capacity + slot, tl.zeros_like(slot) + count, mask=inside)


@triton.jit
def _place(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile, where GROUP rows of tiles are passed through column by column."""
    first = tile // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    left = tile % (GROUP * columns)
    return first + left % height, left // height


@triton.jit
def _block(x, row, column, stride, rows, columns, TMA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a block of FP8, with 0 outside of [rows, columns]; the copy engine knows the tensor's own shape only."""
    if TMA:
        block = x.load([row, column])
    else:
        r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        block = tl.load(x + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def _add(a, b, total, FAST: tl.constexpr):
    """`total + a @ b.T` in FP32: with fast accumulation the sum stays in the tensor cores, otherwise they sum one block."""
    if FAST:
        total = tl.dot(a, b.T, total)
    else:
        total += tl.dot(a, b.T)
    return total


@triton.jit
def _put_tile(y, values, row, end, column, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HARDWARE: tl.constexpr):
    """Store a tile to row-major [end, N], without what lies outside."""
    r, c = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    inside = (r < end)[:, None] & (c < N)[None, :]
    at = y + r.to(tl.int64)[:, None] * N + c[None, :]
    tl.store(at, _rounded(values, y.dtype.element_ty, HARDWARE), mask=inside)


@triton.jit
def _grouped_mm_kernel(
    a, b, y, tiles, a_scale_inv, b_scale_inv, M, E, capacity, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HALVES_M: tl.constexpr, HALVES_N: tl.constexpr,
    GROUP: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, FLATTEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_M // HALVES_M
    COLUMNS: tl.constexpr = BLOCK_N // HALVES_N
    columns = tl.cdiv(N, BLOCK_N)
    rows = tl.load(tiles + 3 * capacity)
    a_factor = tl.load(a_scale_inv)
    for tile in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0), flatten=FLATTEN):
        m, n = _place(tile, rows, columns, GROUP)
        expert, first, end = tl.load(tiles + m), tl.load(tiles + capacity + m), tl.load(tiles + 2 * capacity + m)
        factor = a_factor * tl.load(b_scale_inv + expert)
        column = n * BLOCK_N
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        total_1 = total
        for k in range(tl.cdiv(K, BLOCK_K)):
            left = _block(a, first, k * BLOCK_K, K, M, K, TMA, ROWS, BLOCK_K)
            right = _block(b, expert * N + column, k * BLOCK_K, K, E * N, K, TMA, COLUMNS, BLOCK_K)
            total = _add(left, right, total, FAST)
            if HALVES_M == 2:
                left = _block(a, first + ROWS, k * BLOCK_K, K, M, K, TMA, ROWS, BLOCK_K)
            if HALVES_N == 2:
                right = _block(b, expert * N + column + COLUMNS, k * BLOCK_K, K, E * N, K, TMA, COLUMNS, BLOCK_K)
            if HALVES_M * HALVES_N == 2:
                total_1 = _add(left, right, total_1, FAST)
        _put_tile(y, total * factor, first, end, column, N, ROWS, COLUMNS, HARDWARE)
        if HALVES_M * HALVES_N == 2:
            first, column = first + BLOCK_M - ROWS, column + BLOCK_N - COLUMNS
            _put_tile(y, total_1 * factor, first, end, column, N, ROWS, COLUMNS, HARDWARE)


@triton.jit
def _grad_weight_kernel(
    a_t, b_t, y, offsets, a_scale_inv, b_scale_inv, M, E, a_stride, b_stride, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HALVES_M: tl.constexpr, HALVES_N: tl.constexpr,
    GROUP: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, FLATTEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_M // HALVES_M
    COLUMNS: tl.constexpr = BLOCK_N // HALVES_N
    rows = tl.cdiv(N, BLOCK_M)
    columns = tl.cdiv(K, BLOCK_N)
    factor = tl.load(a_scale_inv) * tl.load(b_scale_inv)
    for tile in tl.range(tl.program_id(0), E * rows * columns, tl.num_programs(0), flatten=FLATTEN):
        expert = tile // (rows * columns)
        m, n = _place(tile % (rows * columns), rows, columns, GROUP)
        row, column = m * BLOCK_M, n * BLOCK_N
        start = tl.minimum(tl.load(offsets + expert - 1, mask=expert > 0, other=0), M)
        end = tl.minimum(tl.load(offsets + expert), M)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        total_1 = total
        for at in range(start, end, BLOCK_K):  # up to `end`: what follows in memory belongs to the next expert
            left = _block(a_t, row, at, a_stride, N, end, TMA, ROWS, BLOCK_K)
            right = _block(b_t, column, at, b_stride, K, end, TMA, COLUMNS, BLOCK_K)
            total = _add(left, right, total, FAST)
            if HALVES_M == 2:
                left = _block(a_t, row + ROWS, at, a_stride, N, end, TMA, ROWS, BLOCK_K)
            if HALVES_N == 2:
                right = _block(b_t, column + COLUMNS, at, b_stride, K, end, TMA, COLUMNS, BLOCK_K)
            if HALVES_M * HALVES_N == 2:
                total_1 = _add(left, right, total_1, FAST)
        y_e = y + expert.to(tl.int64) * N * K
        _put_tile(y_e, total * factor, row, N, column, K, ROWS, COLUMNS, HARDWARE)
        if HALVES_M * HALVES_N == 2:
            row, column = row + BLOCK_M - ROWS, column + BLOCK_N - COLUMNS
            _put_tile(y_e, total_1 * factor, row, N, column, K, ROWS, COLUMNS, HARDWARE)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; two programs under the interpreter, so that each gets several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _operands(a: torch.Tensor, b: torch.Tensor, tma: bool, tiling: Tiling) -> tuple[Any, Any]:
    """Both operands, 2-dimensional, as a kernel takes them: descriptors of the blocks that it loads, or the tensors themselves."""
    if not tma:
        return a, b
    rows = tiling.block_m // tiling.halves_m, tiling.block_n // tiling.halves_n
    blocks = [[n, tiling.block_k] for n in rows]
    return tuple(TensorDescriptor(x, list(x.shape), list(x.stride()), n) for x, n in zip((a, b), blocks, strict=True))  # type: ignore[return-value]


def _aligned(*operands: torch.Tensor) -> bool:
    """Whether the copy engine can load blocks of these: rows and base aligned to 16 bytes."""
    return all(x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0 and x.numel() for x in operands)


def _meta(tiling: Tiling, tma: bool, fast_accum: bool, device: torch.device) -> dict[str, Any]:
    meta = {
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "GROUP": tiling.group,
        "HALVES_M": tiling.halves_m,
        "HALVES_N": tiling.halves_n,
        "TMA": tma,
        "FAST": fast_accum,
        "FLATTEN": tiling.flatten,
        "HARDWARE": device.type == "cuda",
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    return meta if tiling.maxnreg is None else meta | {"maxnreg": tiling.maxnreg}


SMALL = Tiling(128, 64, 64, warps=4, stages=3, tma=False)  # for other GPUs, which have less shared memory, and for single bytes
# Two programs per multiprocessor: while one adds a block's sums to the total or stores its tile, the other one multiplies.
SHARED = Tiling(128, 128, 128, stages=3, halves_n=2, programs=2, maxnreg=128)
NARROW = SHARED._replace(group=4)
WIDE = Tiling(128, 256, 128, stages=4)
FUSED = Tiling(128, 128, 128, warps=4, stages=3, programs=2, flatten=True)
SHORT = 1024  # elements of a short sum, where storing a tile takes as long as summing it
# By product and fast accumulation: for long sums and for short ones.
TILINGS = {
    ("rows", True): (WIDE, FUSED),
    ("rows", False): (NARROW, NARROW),
    ("grad_weight", True): (WIDE, WIDE),
    ("grad_weight", False): (SHARED, NARROW),
}


def tiling_of(product: str, summed: int, device: torch.device, *, fast_accum: bool, aligned: bool = True) -> Tiling:
    """Return the fastest known tiling, as a sweep of tilings on H200s found it (tools/bench/LOG.md).

    Args:
        product: "rows" for `grouped_mm`, or "grad_weight".
        summed: elements of the summed dimension; rows of an average expert for "grad_weight".
        device: of the operands.
        fast_accum, aligned: as in `grouped_mm` and `grouped_mm_grad_weight`.
    """
    if not aligned or (device.type == "cuda" and not blockwise_hardware(device)):
        return SMALL
    return TILINGS[product, fast_accum][summed <= SHORT]


def grouped_mm(a, b, offsets, a_scale_inv, b_scale_inv, out_dtype, *, fast_accum, tiles=None):
    """See the reference twin."""
    if a.is_cuda and not fp8_hardware(a.device):
        return _twin.grouped_mm(a, b, offsets, a_scale_inv, b_scale_inv, out_dtype, fast_accum=fast_accum)
    tiling = tiling_of("rows", a.shape[1], a.device, fast_accum=fast_accum)
    a, b = a.contiguous(), b.contiguous()
    (M, K), (E, N, _) = a.shape, b.shape
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if tiles is None:
        tiles = grouped_tiles(offsets, M, tiling.block_m)
    tma = tiling.tma and _aligned(a, b)
    programs = min(_multiprocessors(a.device) * tiling.programs, tiles.shape[1] * -(-N // tiling.block_n))
    _grouped_mm_kernel[programs,](
        *_operands(a, b.view(E * N, K), tma, tiling), out, tiles,
        a_scale_inv, b_scale_inv, M, E, tiles.shape[1], N, K, **_meta(tiling, tma, fast_accum, a.device),
    )  # fmt: skip
    return out


def grouped_mm_grad_weight(a_t, b_t, offsets, a_scale_inv, b_scale_inv, out_dtype, *, fast_accum, aligned=False):
    """See the reference twin."""
    if a_t.is_cuda and not fp8_hardware(a_t.device):
        return _twin.grouped_mm_grad_weight(a_t, b_t, offsets, a_scale_inv, b_scale_inv, out_dtype, fast_accum=fast_accum)
    rows = a_t.shape[1] // offsets.numel()
    tiling = tiling_of("grad_weight", rows, a_t.device, fast_accum=fast_accum, aligned=aligned)
    a_t, b_t = (x if x.stride(1) == 1 else x.contiguous() for x in (a_t, b_t))
    (N, M), K, E = a_t.shape, b_t.shape[0], offsets.numel()
    out = torch.empty((E, N, K), dtype=out_dtype, device=a_t.device)
    if not out.numel():
        return out
    tma = aligned and tiling.tma and _aligned(a_t, b_t)
    tiles = E * -(-N // tiling.block_m) * -(-K // tiling.block_n)
    programs = min(_multiprocessors(a_t.device) * tiling.programs, tiles)
    _grad_weight_kernel[programs,](
        *_operands(a_t, b_t, tma, tiling),
        out, offsets, a_scale_inv, b_scale_inv, M, E, a_t.stride(0), b_t.stride(0), N, K,
        **_meta(tiling, tma, fast_accum, a_t.device),
    )  # fmt: skip
    return out


def grouped_tiles(offsets, rows, block):
    """See the reference twin."""
    experts = offsets.numel()
    capacity = tile_capacity(rows, experts, block)
    table = torch.empty((4, capacity), dtype=torch.int32, device=offsets.device)
    _grouped_tiles_kernel[-(-capacity // SLOTS),](
        offsets, table, rows, experts, capacity, BLOCK=block, EXPERTS=triton.next_power_of_2(experts), SLOTS=SLOTS, num_warps=4
    )
    return table
