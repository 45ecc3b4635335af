"""Layout of a bucket: a flat buffer with the gradients of some parameters, where slice r is what rank r owns, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from msamp.comm.partition import Piece
from msamp.kernels import ops
from msamp.kernels.reference.pack import TALLY
from msamp.kernels.tables import Tables
from msamp.numerics.formats import E4M3, Format
from msamp.numerics.tensor import Tally


@dataclass(eq=False)
class Segment:
    """One piece of a parameter in a bucket.

    Attributes:
        index: position of the parameter in the bucket.
        row, rows: its rows along dim 0 (a 0-dim parameter has one).
        owner: rank that sums it and, under ZeRO, updates it.
        start, elements: its range in the flat buffer.
        grad: under ZeRO on the owner, after `GradSync.finish`: the averaged gradient of these rows, or None.
    """

    index: int
    row: int
    rows: int
    owner: int
    start: int
    elements: int
    grad: torch.Tensor | None = None


class Bucket:
    """The layout of a bucket, and its gradients in this step.

    Args:
        params: in the order in which backward produces their gradients.
        names: of the parameters, for messages.
        fmt: the format in which their gradients are sent.
        pieces: of these parameters, where `tensor` is the index in `params`; together they cover every parameter.
        ranks, rank: of the data-parallel group.

    Attributes:
        segments: all pieces in the order of the flat buffer, by (owner, parameter, row).
        owned: the segments of this rank.
        sizes: elements that each rank owns.
        cut: whether any parameter has more than one piece.
        own: this rank's slice of the flat buffer.
        spans: for each segment its parameter, its first element there, its number of elements, and its first element in the flat buffer.
        tables, sum_tables: of the launches over this bucket's gradients, and over the pieces of their sum.
        gradients: this rank's gradients, by index in `params`; None until backward has produced one.
        waiting: number of gradients that are still missing.
        sent: whether the bucket was sent in this step.
        absent: indices of parameters for which no rank had a gradient.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], names: Sequence[str], fmt: Format, pieces: Sequence[Piece], ranks: int, rank: int
    ) -> None:
        self.params = list(params)
        self.names = list(names)
        self.format = fmt
        self.segments: list[Segment] = []
        self.sizes = [0] * ranks
        start = 0
        for piece in sorted(pieces, key=lambda piece: (piece.owner, piece.tensor, piece.row)):
            p = self.params[piece.tensor]
            elements = piece.rows * (p.numel() // max(1, p.shape[0])) if p.dim() else 1
            self.segments.append(Segment(piece.tensor, piece.row, piece.rows, piece.owner, start, elements))
            self.sizes[piece.owner] += elements
            start += elements
        self.owned = [segment for segment in self.segments if segment.owner == rank]
        self.own = slice(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))
        self.cut = len(self.segments) > len(self.params)
        self.spans = [
            (segment.index, segment.row * (segment.elements // max(1, segment.rows)), segment.elements, segment.start)
            for segment in self.segments
        ]
        device = self.params[0].device
        self.tables, self.sum_tables = Tables(device), Tables(device)
        # The last step's factors, always in the same memory, since CUDA graphs read and write them.
        self._guess = torch.ones(len(self.params), device=device, dtype=torch.float32)
        self._run_params = torch.tensor([segment.index for segment in self.segments], device=device)
        self.clear()

    def clear(self) -> None:
        """Forget the gradients of the last step."""
        self.gradients: list[torch.Tensor | None] = [None] * len(self.params)
        self.waiting = len(self.params)
        self.sent = False
        self.absent: set[int] = set()
        self._tally: Tally | None = None
        self._guessed: _Guessed | None = None
        for segment in self.owned:
            segment.grad = None

    def __str__(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} ... {self.names[-1]}"

    def part(self, segment: Segment, own: torch.Tensor) -> torch.Tensor:
        """Return the elements of one of this rank's segments in `own`, this rank's slice of a flat buffer."""
        start = segment.start - self.own.start
        return own[start : start + segment.elements]

    def measure(self, gradients: Sequence[torch.Tensor], fmt: Format) -> torch.Tensor:
        """Return the amax of each gradient, FP32 [parameters], +inf for a non-finite one. `gradients` and `fmt` are those of `flatten`.

        The same read also packs the gradients with the last step's factors as a guess. `flatten`, which gets the right factors, then packs
        only the gradients for which the guess was wrong. The result does not depend on the guess.
        """
        flat = torch.empty(sum(self.sizes), dtype=fmt.dtype, device=gradients[0].device)
        amaxes = torch.zeros(len(gradients), device=flat.device, dtype=torch.float32)
        tallies = torch.zeros(2, len(self.spans), TALLY, dtype=torch.int64, device=flat.device) if fmt == E4M3 else None
        ops.pack(self.tables, gradients, self.spans, flat, self._guess, amaxes=amaxes, tallies=None if tallies is None else tallies[0])
        self._guessed = _Guessed(tuple(gradients), versions_of(gradients), fmt, flat, tallies)
        return amaxes

    def forget(self) -> None:
        """Drop what `measure` packed and `flatten` did not use, and the tallies."""
        self._guessed = self._tally = None

    def tallies(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Return the tallies of `ops.pack` for each segment of the buffer that `flatten` returned last, int64 [segments, 3].

        None if there are none, if `flat` is another buffer, or if it has changed since.
        """
        return None if self._tally is None else self._tally.of(flat)

    def flatten(self, gradients: Sequence[torch.Tensor], fmt: Format, factor: torch.Tensor | None = None) -> torch.Tensor:
        """Return the flat buffer with `cast(g * factor)` of each parameter's gradient.

        Args:
            gradients: contiguous.
            fmt: of the buffer.
            factor: FP32 [parameters]; None casts without one.
        """
        guessed, self._guessed, self._tally = self._guessed, None, None
        if guessed is None or factor is None or not guessed.of(gradients, fmt):
            flat = torch.empty(sum(self.sizes), dtype=fmt.dtype, device=gradients[0].device)
            ops.pack(self.tables, gradients, self.spans, flat, factor)
            return flat
        flat, tallies = guessed.flat, guessed.tallies
        again = None if tallies is None else tallies[1]
        ops.pack(self.tables, gradients, self.spans, flat, factor, tallies=again, unless=self._guess)
        if tallies is not None:
            right = (factor == self._guess)[self._run_params]
            self._tally = Tally(torch.where(right.unsqueeze(1), tallies[0], tallies[1]), flat)
        self._guess.copy_(factor)
        return flat

    def unflatten(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return one payload per parameter from the flat buffer, in the parameter's shape: a view if the parameter is not cut."""
        parts: list[list[tuple[int, torch.Tensor]]] = [[] for _ in self.params]
        for segment in self.segments:
            parts[segment.index].append((segment.row, flat[segment.start : segment.start + segment.elements]))
        payloads = []
        for p, pieces in zip(self.params, parts, strict=True):
            ordered = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
            whole = ordered[0] if len(ordered) == 1 else torch.cat([as_bytes(piece) for piece in ordered]).view(flat.dtype)
            payloads.append(whole.view(p.shape))
        return payloads


@dataclass(frozen=True)
class _Guessed:
    """What `Bucket.measure` packed: the gradients and their versions, the format, the buffer, and tallies of both passes."""

    gradients: tuple[torch.Tensor, ...]
    versions: list[int]
    format: Format
    flat: torch.Tensor
    tallies: torch.Tensor | None

    def of(self, gradients: Sequence[torch.Tensor], fmt: Format) -> bool:
        same = len(gradients) == len(self.gradients) and all(a is b for a, b in zip(gradients, self.gradients, strict=True))
        return same and fmt == self.format and versions_of(gradients) == self.versions


def versions_of(xs: Sequence[torch.Tensor]) -> list[int]:
    """Return the version counters of tensors; -1 for inference tensors, which have none."""
    return [-1 if x.is_inference() else x._version for x in xs]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View a flat contiguous tensor as uint8, which every backend can send and every device can concatenate, unlike FP8."""
    return x.view(torch.uint8)
