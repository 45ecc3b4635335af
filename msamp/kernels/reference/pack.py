"""Pack many gradients into one flat buffer and measure them in the same read.

The scale of a gradient follows from its amax, which normally takes a separate read before the cast. But the scale, a power of two, is
usually the previous step's. So gradients are packed with that scale as a guess while their amaxes are measured, and packed again only
if the guess was wrong (`msamp.comm.bucket`): one read instead of two, with the same bits. The statistics for the gradient norm, the largest
code and the sum of squares, are measured in the same read.

The same kernel averages what ranks sent: each tensor then holds a payload per rank, which are summed in FP32 while they are read. The sum
itself never exists in memory, so an average costs one byte read per rank and one written.
"""

from collections.abc import Sequence
from typing import Any

import torch

from msamp.kernels.reference.grad_stats import PAYLOAD_UNITS, square_sum
from msamp.kernels.tables import Tables
from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import cast, quantize

FlatPiece = tuple[int, int, int, int]
TALLY = 3  # numbers per piece


def check_pieces(
    xs: Sequence[torch.Tensor],
    pieces: Sequence[FlatPiece],
    out: torch.Tensor,
    *others: Any,
    ranks: int = 1,
    **flags: Any,
) -> None:
    """Raise a ValueError for a piece outside its tensor or `out`, or for tensors on several devices. Arguments as in `pack`, without its
    tables."""
    if not all(x.device == out.device for x in xs):
        raise ValueError(f"tensors are not all on {out.device}, where the buffer is; pass tensors of one device")
    sizes, room = [x.numel() // ranks for x in xs], out.numel()
    for i, first, elements, start in pieces:
        if first + elements > sizes[i] or start + elements > room:
            raise ValueError(
                f"a piece of {elements} elements from {first}, written at {start}, exceeds tensor {i} of {sizes[i]} elements or the buffer "
                f"of {room}; a gradient must have its parameter's shape"
            )


def pack(
    tables: Tables | None,
    xs: Sequence[torch.Tensor],
    pieces: Sequence[FlatPiece],
    out: torch.Tensor,
    factors: torch.Tensor | None,
    *,
    amaxes: torch.Tensor | None = None,
    tallies: torch.Tensor | None = None,
    unless: torch.Tensor | None = None,
    ranks: int = 1,
    divisor: int = 1,
) -> None:
    """Write `cast(x * factor)` for pieces of tensors to `out`: one read, one write.

    Args:
        tables: stores the kernel's table of addresses; the twin needs none.
        xs: contiguous, in any format; [ranks, n] with several `ranks`.
        pieces: for each piece the index in `xs`, its first element there, its number of elements, and its first element in `out`.
        out: flat, in any format, changed in place.
        factors: FP32 [len(xs)]; None: 1.
        amaxes: FP32 [len(xs)], raised to the largest magnitude of each tensor's pieces, +inf if one is not finite; None: not measured.
        tallies: int64 [len(pieces), 3], for E4M3, the statistics of each piece: the largest magnitude of its codes' values, as the bits of
            FP32; the sum of their squares in 1 / `PAYLOAD_UNITS`, as whole units and 2^-30 units, not yet `carried`. With a NaN among the
            values the largest is infinity and the others are meaningless. None: not measured.
        unless: FP32 [len(xs)], the factors with which `out` was written before: a tensor whose factor did not change is skipped.
        ranks: rows of each x. Its values are the sum of the rows in FP32, always in their order; pieces are of a row.
        divisor: by which the values are divided in FP32, before anything else.
    """
    fmt = of_dtype(out.dtype)
    for piece, (i, first, elements, start) in enumerate(pieces):
        if unless is not None and factors is not None and unless[i] == factors[i]:
            continue
        x, *others = xs[i].reshape(ranks, -1)[:, first : first + elements].float()
        for other in others:
            x = x + other
        # Not by a number: on a GPU torch would multiply by its rounded inverse.
        x = x / torch.full((), divisor, dtype=torch.float32, device=x.device)
        part = cast(x, fmt) if factors is None else quantize(x, factors[i], fmt)
        out[start : start + elements] = part
        if not elements:
            continue
        if amaxes is not None:
            amaxes[i] = torch.maximum(amaxes[i], _largest(x))
        if tallies is not None:
            values = part.float()
            tallies[piece, 0] = torch.maximum(tallies[piece, 0], _largest(values).view(torch.int32))
            tallies[piece, 1:] += square_sum(values.nan_to_num(), torch.ones((), dtype=torch.float64, device=x.device), PAYLOAD_UNITS)


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax().nan_to_num(float("inf"), posinf=float("inf"))
