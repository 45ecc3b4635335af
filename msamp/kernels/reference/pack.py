"""Many gradients into one flat buffer."""

from collections.abc import Sequence

import torch

from msamp.kernels.tables import Tables
from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import cast, quantize

Span = tuple[int, int, int, int]


def check_spans(xs: Sequence[torch.Tensor], spans: Sequence[Span], out: torch.Tensor, factors: torch.Tensor | None) -> None:
    """ValueError for a run that leaves its tensor or `out`, and for another number of factors than tensors, or another device; the
    arguments are those of `pack`, without its tables."""
    if factors is not None and factors.numel() != len(xs):
        raise ValueError(f"{len(xs)} tensors are given with {factors.numel()} factors; give as many")
    if not all(x.device == out.device for x in xs):
        raise ValueError(f"tensors to be packed are not all on {out.device}, where the buffer is; give those of one device")
    sizes, room = [x.numel() for x in xs], out.numel()
    for i, first, elements, start in spans:
        if min(first, elements, start) < 0 or first + elements > sizes[i] or start + elements > room:
            raise ValueError(
                f"a run of {elements} elements from {first} on, to {start} of the buffer, leaves tensor {i} of {sizes[i]} elements or the "
                f"buffer of {room}; the gradient's shape must be its parameter's"
            )


def pack(tables: Tables | None, xs: Sequence[torch.Tensor], spans: Sequence[Span], out: torch.Tensor, factors: torch.Tensor | None) -> None:
    """Write `cast(x * factor)` of runs of tensors to their places in `out`: one read, one write.

    Args:
        tables: where the kernel keeps its table of addresses; the twin needs none.
        xs: contiguous; FP32, BF16 or FP16.
        spans: of each run which of `xs`, its first element there, its number of elements, its first element in `out`.
        out: flat, in any format, changed in place.
        factors: FP32 [len(xs)]; None casts without one.
    """
    fmt = of_dtype(out.dtype)
    for i, first, elements, start in spans:
        run = xs[i].reshape(-1)[first : first + elements].float()
        out[start : start + elements] = cast(run, fmt) if factors is None else quantize(run, factors[i], fmt)
