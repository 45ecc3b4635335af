"""Pack tensors whose factors follow from their amaxes, with one read instead of two.

The factors are powers of two and usually those of the step before. So `measure`, which reads the tensors for their amaxes, packs them in
the same read with the last factors as a guess, and `pack`, which gets the right factors, packs again only the tensors for which the guess
was wrong. The result does not depend on the guess. A bucket has two of these: one for its gradients, one for the mean over the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from msamp.kernels import ops
from msamp.kernels.reference.pack import TALLY, Span
from msamp.kernels.tables import Tables
from msamp.numerics.formats import E4M3, Format
from msamp.numerics.tensor import Tally


class GuessedPack:
    """Packs runs of the same tensors into a flat buffer, step after step.

    Args:
        spans: of the runs, as for `ops.pack`; together they fill the buffer.
        tensors: number of tensors.
        device: of the tensors.
        tallied: whether runs into E4M3 are also tallied (`ops.pack`), for the gradient norm.

    Attributes:
        spans: as passed.
        tables: of the launches.
    """

    def __init__(self, spans: Sequence[Span], tensors: int, device: torch.device, *, tallied: bool) -> None:
        self.spans, self.tables = spans, Tables(device)
        self._elements = sum(elements for _, _, elements, _ in spans)
        self._tallied = tallied
        # The last step's factors, always in the same memory, since CUDA graphs read and write them.
        self._guess = torch.ones(tensors, device=device, dtype=torch.float32)
        self._tensor_of_run = torch.tensor([tensor for tensor, *_ in spans], dtype=torch.int64, device=device)
        self.forget()

    def forget(self) -> None:
        """Drop what `measure` packed and `pack` did not use, and the tallies."""
        self._guessed: _Guessed | None = None
        self._tally: Tally | None = None

    def measure(self, xs: Sequence[torch.Tensor], fmt: Format, *, ranks: int = 1) -> torch.Tensor:
        """Return the amax of each tensor's values, FP32 [tensors], +inf if one is not finite.

        Args:
            xs, fmt: those of `pack`.
            ranks: rows of each x, whose mean in FP32 is its value.
        """
        flat = torch.empty(self._elements, dtype=fmt.dtype, device=xs[0].device)
        amaxes = torch.zeros(len(xs), device=flat.device, dtype=torch.float32)
        tallied = self._tallied and fmt == E4M3
        tallies = torch.zeros(2, len(self.spans), TALLY, dtype=torch.int64, device=flat.device) if tallied else None
        first = None if tallies is None else tallies[0]
        ops.pack(self.tables, xs, self.spans, flat, self._guess, amaxes=amaxes, tallies=first, ranks=ranks, divisor=ranks)
        self._guessed = _Guessed(tuple(xs), versions_of(xs), fmt, ranks, flat, tallies)
        return amaxes

    def pack(self, xs: Sequence[torch.Tensor], fmt: Format, factor: torch.Tensor | None = None, *, ranks: int = 1) -> torch.Tensor:
        """Return the flat buffer with `cast(x * factor)` of each tensor.

        Args:
            xs: contiguous; [ranks, n] with several `ranks`.
            fmt: of the buffer.
            factor: FP32 [tensors]; None casts without one.
            ranks: as for `measure`.
        """
        guessed = self._guessed
        self.forget()
        if guessed is None or factor is None or not guessed.of(xs, fmt, ranks):
            flat = torch.empty(self._elements, dtype=fmt.dtype, device=xs[0].device)
            ops.pack(self.tables, xs, self.spans, flat, factor, ranks=ranks, divisor=ranks)
            return flat
        flat, tallies = guessed.flat, guessed.tallies
        again = None if tallies is None else tallies[1]
        ops.pack(self.tables, xs, self.spans, flat, factor, tallies=again, unless=self._guess, ranks=ranks, divisor=ranks)
        if tallies is not None:
            right = (factor == self._guess)[self._tensor_of_run]
            self._tally = Tally(torch.where(right.unsqueeze(1), tallies[0], tallies[1]), flat)
        self._guess.copy_(factor)
        return flat

    def tallies(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Return the tallies of each run of the buffer that `pack` returned last, int64 [runs, 3].

        None if there are none, if `flat` is another buffer, or if it has changed since.
        """
        return None if self._tally is None else self._tally.of(flat)


@dataclass(frozen=True)
class _Guessed:
    """What `measure` packed: the tensors and their versions, the format, rows per tensor, the buffer, and tallies of both passes."""

    xs: tuple[torch.Tensor, ...]
    versions: list[int]
    format: Format
    ranks: int
    flat: torch.Tensor
    tallies: torch.Tensor | None

    def of(self, xs: Sequence[torch.Tensor], fmt: Format, ranks: int) -> bool:
        same = len(xs) == len(self.xs) and all(a is b for a, b in zip(xs, self.xs, strict=True))
        return same and fmt == self.format and ranks == self.ranks and versions_of(xs) == self.versions


def versions_of(xs: Sequence[torch.Tensor]) -> list[int]:
    """Return the version counters of tensors; -1 for inference tensors, which have none."""
    return [-1 if x.is_inference() else x._version for x in xs]
