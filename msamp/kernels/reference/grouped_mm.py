"""Grouped FP8 GEMMs of a mixture of experts: each expert multiplies its own rows by its own weight."""

from typing import NamedTuple

import torch

from msamp.kernels.scaled_mm import SPAN, _decode
from msamp.numerics import accumulation

GROUP_ALIGNMENT = 128  # rows to which a group may be padded, so that no block of a weight gradient's sum reaches into the next group


class Groups(NamedTuple):
    """Rows of each expert, read from the device: for the definitions here, never for a kernel."""

    starts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, offsets: torch.Tensor, rows: int) -> "Groups":
        """Return the rows [start, end) of each expert; ends beyond `rows` are moved there."""
        ends = [min(end, rows) for end in offsets.tolist()]
        return cls([0, *ends[:-1]], ends)


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    fast_accum: bool,
    tiles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `a[rows of e] @ b[e].T` for every expert e: the forward product of an expert layer with `b` its weights [experts, outputs,
    inputs], and grad_input with `b` their transposes [experts, inputs, outputs].

    Args:
        a: [M, K] FP8, row-major, rows sorted by expert.
        b: [E, N, K] FP8, row-major; at most one of the two is E5M2.
        offsets: int32 [E], not decreasing: expert e has the rows from `offsets[e - 1]` (0 for the first) to `offsets[e]`. It is read on the
            device only. An expert may have no rows, and the groups any size.
        a_scale_inv: FP32, 0-dim.
        b_scale_inv: FP32 [E], one per expert.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        fast_accum: let the tensor cores keep partial sums at reduced precision; otherwise they are added in FP32 every 128 elements.
        tiles: `grouped_tiles(offsets, M, GROUP_ALIGNMENT)`, which products with the same offsets share; by default it is computed here.

    Returns:
        [M, N] of `out_dtype`; rows after the last expert's are undefined, here 0.
    """
    out = a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
    factors = a_scale_inv * b_scale_inv
    for e, (start, end) in enumerate(zip(*Groups.of(offsets, a.shape[0]), strict=True)):
        if end > start:
            out[start:end] = _product(a[start:end], b[e], fast_accum).mul_(factors[e]).to(out_dtype)
    return out


def grouped_mm_grad_weight(
    a_t: torch.Tensor,
    b_t: torch.Tensor,
    offsets: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    fast_accum: bool,
    aligned: bool = False,
) -> torch.Tensor:
    """Compute `a_t[:, rows of e] @ b_t[:, rows of e].T` for every expert e: the weight gradient, from the transposed grad_output and the
    transposed input. Hopper's FP8 GEMM requires that the dimension which is summed over, here the rows, comes last in memory.

    Args:
        a_t: [N, M] FP8; its rows are contiguous but may be farther apart than M.
        b_t: [K, M] FP8, likewise; at most one of the two is E5M2.
        offsets: int32 [E], as in `grouped_mm`.
        a_scale_inv, b_scale_inv: FP32, 0-dim.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        fast_accum: as in `grouped_mm`.
        aligned: all offsets are multiples of `GROUP_ALIGNMENT`, with padding rows of zeros in one operand and of finite values in the
            other. Only then can the copy engine load the operands; otherwise the kernel loads single bytes, which is several times slower.
            It is not checked, since that would wait for the device: with other offsets the sums are wrong.

    Returns:
        [E, N, K] of `out_dtype`; 0 for an expert without rows.
    """
    out = a_t.new_zeros((offsets.numel(), a_t.shape[0], b_t.shape[0]), dtype=out_dtype)
    factor = a_scale_inv * b_scale_inv
    for e, (start, end) in enumerate(zip(*Groups.of(offsets, a_t.shape[1]), strict=True)):
        if end > start:
            out[e] = _product(a_t[:, start:end], b_t[:, start:end], fast_accum).mul_(factor).to(out_dtype)
    return out


def _product(a: torch.Tensor, b: torch.Tensor, fast_accum: bool) -> torch.Tensor:
    """Return `a @ b.T` of FP8 codes in FP32; without fast accumulation, partial sums over 128 elements are added from the first to the
    last, as the kernel adds them. The tensor cores' sums are `msamp.numerics.accumulation`'s."""
    if accumulation.like_hopper():
        return accumulation.product(a, b, "fast" if fast_accum else "full")
    left, right = _decode(a, torch.float32), _decode(b, torch.float32)
    out = left.new_zeros((left.shape[0], right.shape[0]))
    span = max(1, left.shape[1]) if fast_accum else SPAN
    for at in range(0, left.shape[1], span):
        out.addmm_(left[:, at : at + span], right[:, at : at + span].t())
    return out


def tile_capacity(rows: int, experts: int, block: int) -> int:
    """Return the most tiles of `block` rows that `rows` can occupy: one partly filled tile per expert."""
    return -(-rows // block) + experts


def grouped_tiles(offsets: torch.Tensor, rows: int, block: int) -> torch.Tensor:
    """Divide the rows of every expert into tiles of at most `block` rows, on the device: the schedule of `grouped_mm`.

    Args:
        offsets: int32 [E], as in `grouped_mm`.
        rows: M, all rows of the operand.
        block: rows per tile.

    Returns:
        int32 [4, capacity]: expert, first row and end of each tile, in order; rows after the last expert's are in none. The fourth row
        contains the number of tiles. Entries after the last tile are 0. The capacity depends only on shapes (`tile_capacity`).
    """
    experts = offsets.numel()
    table = torch.zeros((4, tile_capacity(rows, experts, block)), dtype=torch.int32, device=offsets.device)
    spans = enumerate(zip(*Groups.of(offsets, rows), strict=True))
    entries = [(e, first, end) for e, (start, end) in spans for first in range(start, end, block)]
    if entries:
        table[:3, : len(entries)] = torch.tensor(entries, dtype=torch.int32, device=offsets.device).t()
    table[3] = len(entries)
    return table
