"""Layout of a bucket: a flat buffer with the gradients of some parameters, where slice r is what rank r owns, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from msamp.comm.guessed_pack import GuessedPack
from msamp.comm.partition import Piece
from msamp.numerics.formats import Format


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
        tables: of the launches over this bucket's gradients.
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
        self._packed = GuessedPack(self.spans, len(self.params), device, tallied=True)
        own_spans = [(s.index, s.start - self.own.start, s.elements, s.start - self.own.start) for s in self.owned]
        self._averaged = GuessedPack(own_spans, len(self.params), device, tallied=False)
        self.tables = self._packed.tables
        self.clear()

    def clear(self) -> None:
        """Forget the gradients of the last step."""
        self.gradients: list[torch.Tensor | None] = [None] * len(self.params)
        self.waiting = len(self.params)
        self.sent = False
        self.absent: set[int] = set()
        self.forget()
        for segment in self.owned:
            segment.grad = None

    def present(self) -> list[torch.Tensor]:
        """Return the parameters for which any rank had a gradient."""
        return [p for i, p in enumerate(self.params) if i not in self.absent]

    def __str__(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} ... {self.names[-1]}"

    def part(self, segment: Segment, own: torch.Tensor) -> torch.Tensor:
        """Return the elements of one of this rank's segments in `own`, this rank's slice of a flat buffer."""
        start = segment.start - self.own.start
        return own[start : start + segment.elements]

    def measure(self, gradients: Sequence[torch.Tensor], fmt: Format) -> torch.Tensor:
        """Return the amax of each gradient, FP32 [parameters], +inf for a non-finite one; see `GuessedPack.measure`. `gradients` and `fmt`:
        as for `flatten`."""
        return self._packed.measure(gradients, fmt)

    def flatten(self, gradients: Sequence[torch.Tensor], fmt: Format, factor: torch.Tensor | None = None) -> torch.Tensor:
        """Return the flat buffer with `cast(g * factor)` of each parameter's gradient.

        Args:
            gradients: contiguous.
            fmt: of the buffer.
            factor: FP32 [parameters]; None casts without one.
        """
        return self._packed.pack(gradients, fmt, factor)

    def tallies(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Return the tallies of each segment of the buffer that `flatten` returned last, int64 [segments, 3]; see `GuessedPack.tallies`."""
        return self._packed.tallies(flat)

    def measure_mean(self, payloads: torch.Tensor, fmt: Format) -> torch.Tensor:
        """Return the amax of each parameter's mean over the ranks, FP32 [parameters], of the rows that this rank owns; 0 if it owns none.

        Args:
            payloads: [ranks, own elements], contiguous: this rank's slice of each rank's flat buffer.
            fmt: that of `round_mean`.
        """
        return self._averaged.measure([payloads] * len(self.params), fmt, ranks=len(payloads))

    def round_mean(self, payloads: torch.Tensor, fmt: Format, factor: torch.Tensor) -> torch.Tensor:
        """Return `cast(mean * factor)` of this rank's slice, [own elements]; `factor` FP32 [parameters]. The mean over the ranks is summed
        in FP32, in the order of the ranks, and exists in registers only."""
        return self._averaged.pack([payloads] * len(self.params), fmt, factor, ranks=len(payloads))

    def forget(self) -> None:
        """Drop what was measured and not packed, and the tallies."""
        self._packed.forget()
        self._averaged.forget()

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


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View a flat contiguous tensor as uint8, which every backend can send and every device can concatenate, unlike FP8."""
    return x.view(torch.uint8)
