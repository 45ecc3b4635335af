"""Many gradients into one flat buffer, measured on their way.

The scale of a gradient follows from its amax, which takes a read of its own before the cast. But the scale, a power of two, is mostly
that of the step before. So gradients are packed with that one as a guess while their amaxes are taken, and packed again where the guess
was wrong (`msamp.comm.bucket`): one read instead of two, and the same bits. What the norm wants to know of the codes that were
written, their largest and the sum of their squares, is taken on the way too, which spares another read.
"""

from collections.abc import Sequence

import torch

from msamp.kernels.reference.grad_stats import PAYLOAD_UNITS, square_sum
from msamp.kernels.tables import Tables
from msamp.numerics.formats import E4M3, of_dtype
from msamp.numerics.quantize import cast, quantize

Span = tuple[int, int, int, int]
TALLY = 3  # numbers of a run


def check_spans(
    xs: Sequence[torch.Tensor],
    spans: Sequence[Span],
    out: torch.Tensor,
    factors: torch.Tensor | None,
    *,
    amaxes: torch.Tensor | None = None,
    tallies: torch.Tensor | None = None,
    unless: torch.Tensor | None = None,
) -> None:
    """ValueError for a run that leaves its tensor or `out`, for another number of factors than tensors, for tallies that do not fit, or
    another device; the arguments are those of `pack`, without its tables."""
    for name, each in (("factors", factors), ("amaxes", amaxes), ("factors of before", unless)):
        if each is not None and each.numel() != len(xs):
            raise ValueError(f"{len(xs)} tensors are given with {each.numel()} {name}; give as many")
    if unless is not None and factors is None:
        raise ValueError("factors of before are given without factors to compare them with; give both")
    if tallies is not None and (out.dtype != E4M3.dtype or tallies.shape != (len(spans), TALLY)):
        raise ValueError(
            f"tallies of {list(tallies.shape)} are given for {len(spans)} runs into {out.dtype}; they are [runs, {TALLY}], of {E4M3.dtype}"
        )
    if not all(x.device == out.device for x in xs):
        raise ValueError(f"tensors to be packed are not all on {out.device}, where the buffer is; give those of one device")
    sizes, room = [x.numel() for x in xs], out.numel()
    for i, first, elements, start in spans:
        if min(first, elements, start) < 0 or first + elements > sizes[i] or start + elements > room:
            raise ValueError(
                f"a run of {elements} elements from {first} on, to {start} of the buffer, leaves tensor {i} of {sizes[i]} elements or the "
                f"buffer of {room}; the gradient's shape must be its parameter's"
            )


def pack(
    tables: Tables | None,
    xs: Sequence[torch.Tensor],
    spans: Sequence[Span],
    out: torch.Tensor,
    factors: torch.Tensor | None,
    *,
    amaxes: torch.Tensor | None = None,
    tallies: torch.Tensor | None = None,
    unless: torch.Tensor | None = None,
) -> None:
    """Write `cast(x * factor)` of runs of tensors to their places in `out`: one read, one write.

    Args:
        tables: where the kernel keeps its table of addresses; the twin needs none.
        xs: contiguous; FP32, BF16 or FP16.
        spans: of each run which of `xs`, its first element there, its number of elements, its first element in `out`.
        out: flat, in any format, changed in place.
        factors: FP32 [len(xs)]; None casts without one.
        amaxes: FP32 [len(xs)], raised to the largest magnitude of each tensor's runs, +inf where one is not finite; None: not taken.
        tallies: int64 [len(spans), 3], for E4M3: what each run wrote, added up. The largest magnitude of its codes' values, as the bits of
            FP32; their squares in 1 / `PAYLOAD_UNITS`, as whole units and 2^-30 units, to be `carried`. A tally is meaningless where
            a value is NaN, but for its largest, which is then infinity. None: not taken.
        unless: FP32 [len(xs)], factors with which all was written before: a tensor that still has its factor is left alone.
    """
    fmt = of_dtype(out.dtype)
    for run, (i, first, elements, start) in enumerate(spans):
        if unless is not None and factors is not None and unless[i] == factors[i]:
            continue
        x = xs[i].reshape(-1)[first : first + elements].float()
        part = cast(x, fmt) if factors is None else quantize(x, factors[i], fmt)
        out[start : start + elements] = part
        if not elements:
            continue
        if amaxes is not None:
            amaxes[i] = torch.maximum(amaxes[i], _largest(x))
        if tallies is not None:
            values = part.float()
            tallies[run, 0] = torch.maximum(tallies[run, 0], _largest(values).view(torch.int32))
            tallies[run, 1:] += square_sum(values.nan_to_num(), torch.ones((), dtype=torch.float64, device=x.device), PAYLOAD_UNITS)


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax().nan_to_num(float("inf"), posinf=float("inf"))
