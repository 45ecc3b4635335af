"""Amaxes and sums of squares of many gradients, with one launch per format and one read. Twin: `msamp.kernels.reference.grad_stats`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.grad_stats import carried
from msamp.kernels.tables import numbered
from msamp.kernels.triton.pack import _amax_of_bits, _bits, _e4m3_square, _in_payload_units, _pointer, _span, _value
from msamp.numerics.formats import of_dtype
from msamp.numerics.tensor import ScalingTensor


class Tile(NamedTuple):
    """The tiling of a launch: elements per block, blocks loaded at a time, elements per program, and warps."""

    block: int
    blocks: int
    chunk: int
    warps: int


# Measured on an H200 with the gradients of GPT-1.3B, and for BF16's squares of Llama-3-8B's vocabulary: tools/bench/LOG.md.
AMAX = Tile(4096, 2, 32768, 8)  # without squares
CODES = Tile(2048, 4, 65536, 4)  # for E4M3
WIDE = Tile(1024, 1, 32768, 4)  # for other formats; E5M2 was not measured


class StatsRow(NamedTuple):
    """A gradient: its number of elements, the address of its values, its index, the address of its scale_inv or 0, and its units."""

    numel: int
    values: int
    index: int
    scale_inv: int
    units: int


COLUMNS, ROW = 1 + len(StatsRow._fields), tl.constexpr(numbered(StatsRow))


@triton.jit(do_not_specialize=["skipped", "count"])
def _grad_stats_kernel(
    table, owners, skipped, factors, stats, sums, count,
    MANTISSA: tl.constexpr, SCALED: tl.constexpr, SQUARES: tl.constexpr, ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, first, left = _span(table, owners, skipped, COLUMNS, CHUNK, ALIGNED)
    index = tl.load(row + ROW.value.index)
    x = _pointer(tl.load(row + ROW.value.values), MANTISSA, ALIGNED) + first
    largest = tl.zeros((BLOCK,), tl.int32)
    whole_sum = tl.zeros((BLOCK,), tl.int64)
    rest_sum = tl.zeros((BLOCK,), tl.int64)
    factor = 1.0
    units = 0.125
    if SQUARES and not SCALED:
        factor = tl.load(factors + index)
        units = tl.load(row + ROW.value.units).to(tl.float64)
    for start in range(0, left, BLOCK * BLOCKS):
        loaded = ()
        for i in tl.static_range(BLOCKS):  # load all before using any: one block at a time does not saturate the memory
            at = start + i * BLOCK + tl.arange(0, BLOCK)
            loaded = loaded + (tl.load(x + at, mask=at < left, other=0),)  # noqa: RUF005
        for i in tl.static_range(BLOCKS):
            v = _value(loaded[i], MANTISSA, HARDWARE)
            largest = tl.maximum(largest, _bits(v))
            if SQUARES and MANTISSA == 3:
                whole_sum += _e4m3_square(v)
            elif SQUARES:
                d = v.to(tl.float64) * factor
                squares = d * d * units
                # Adding 3 * 2^51 in FP64 rounds to an integer, ties to even, and puts it in the lowest bits; a conversion instruction
                # takes four times as long.
                raised = squares + 6755399441055744.0
                whole_sum += raised.to(tl.int64, bitcast=True) - 0x4338000000000000
                rest = (squares - (raised - 6755399441055744.0)) * 1073741824.0 + 6755399441055744.0
                rest_sum += rest.to(tl.int64, bitcast=True) - 0x4338000000000000
    amax = _amax_of_bits(largest)
    if SCALED:
        scale_inv = tl.load(_pointer(tl.load(row + ROW.value.scale_inv), 23, False))
        amax = amax * tl.abs(scale_inv)
        amax = tl.where(amax == amax, amax, float("inf"))
        tl.store(stats + count + index, tl.where(scale_inv == scale_inv, scale_inv, 0.0))
    tl.atomic_max(stats + index, amax, sem="relaxed")
    if SQUARES:
        whole_total = tl.sum(whole_sum, 0)
        rest_total = tl.sum(rest_sum, 0)
        if MANTISSA == 3:
            whole_total, rest_total = _in_payload_units(whole_total)
        tl.atomic_add(sums + 2 * index, whole_total, sem="relaxed")
        tl.atomic_add(sums + 2 * index + 1, rest_total, sem="relaxed")


def grad_stats(tables, gs, factors=None, units=(), *, squares=True):
    """See the reference twin."""
    stats = torch.zeros(2, len(gs), device=tables.device, dtype=torch.float32)
    sums = torch.zeros(len(gs) if squares else 0, 2, dtype=torch.int64, device=tables.device)
    by_format: dict[tuple[torch.dtype, bool], list[tuple[int, ...]]] = {}
    for i, g in enumerate(gs):
        payload, scale_inv = (g.payload, g.scale_inv.data_ptr()) if isinstance(g, ScalingTensor) else (g, 0)
        kind = payload.dtype, scale_inv != 0
        if kind not in by_format:
            by_format[kind] = []
        by_format[kind].append(
            StatsRow(g.numel(), payload.data_ptr(), i, scale_inv, units[i] if units else 0)
        )  # by position: half the time
    for (dtype, scaled), rows in by_format.items():
        tile = (CODES if dtype == torch.float8_e4m3fn else WIDE) if squares else AMAX
        table, parts = tables.lay_out(("stats", dtype, scaled, squares), rows, 1, tile.chunk)
        skipped = 0
        for owners, aligned in parts:
            _grad_stats_kernel[(owners.numel(),)](
                table, owners, skipped, owners if factors is None else factors, stats, sums, len(gs),
                MANTISSA=of_dtype(dtype).mantissa_bits, SCALED=scaled, SQUARES=squares, ALIGNED=aligned, HARDWARE=stats.is_cuda,
                BLOCK=tile.block, BLOCKS=tile.blocks, CHUNK=tile.chunk, COLUMNS=COLUMNS, num_warps=tile.warps,
            )  # fmt: skip
            skipped += owners.numel()
    return stats, carried(sums) if squares else sums
