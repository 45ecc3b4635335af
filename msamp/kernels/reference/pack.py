"""Many gradients into one flat buffer."""

from collections.abc import Sequence

import torch

from msamp.kernels.tables import Tables
from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import cast, quantize

Span = tuple[int, int, int, int]


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
