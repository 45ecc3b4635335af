"""Layout of a bucket: a flat buffer with the gradients of some parameters, where slice r is what rank r owns, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from msamp.comm.partition import Piece
from msamp.kernels import ops
from msamp.kernels.reference.pack import TALLY, FlatPiece
from msamp.kernels.tables import Tables
from msamp.numerics.formats import E4M3, Format
from msamp.numerics.tensor import Tally


@dataclass(eq=False)
class BucketPiece:
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
        pieces: all pieces in the order of the flat buffer, by (owner, parameter, row).
        owned: the pieces of this rank.
        sizes: elements that each rank owns.
        cut: whether any parameter has more than one piece.
        own: this rank's slice of the flat buffer.
        flat_pieces: for each piece its parameter, first element there, number of elements, and first element in the flat buffer.
        packed: packs the gradients, one contiguous tensor per parameter, into the flat buffer, with tallies of its pieces.
        averaged: packs this rank's slice of the mean over the ranks, from [ranks, own elements] for each parameter: amaxes are of the rows
            that this rank owns, 0 if it owns none. The mean is summed in FP32, in the order of the ranks, and exists in registers only.
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
        self.pieces: list[BucketPiece] = []
        self.sizes = [0] * ranks
        start = 0
        for piece in sorted(pieces, key=lambda piece: (piece.owner, piece.tensor, piece.row)):
            p = self.params[piece.tensor]
            elements = piece.rows * (p.numel() // max(1, p.shape[0])) if p.dim() else 1
            self.pieces.append(BucketPiece(piece.tensor, piece.row, piece.rows, piece.owner, start, elements))
            self.sizes[piece.owner] += elements
            start += elements
        self.owned = [piece for piece in self.pieces if piece.owner == rank]
        self.own = slice(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))
        self.cut = len(self.pieces) > len(self.params)
        self.flat_pieces = [
            (piece.index, piece.row * (piece.elements // max(1, piece.rows)), piece.elements, piece.start) for piece in self.pieces
        ]
        device = self.params[0].device
        self.packed = GuessedPack(self.flat_pieces, len(self.params), device, tallied=True)
        own_pieces = [(s.index, s.start - self.own.start, s.elements, s.start - self.own.start) for s in self.owned]
        self.averaged = GuessedPack(own_pieces, len(self.params), device, tallied=False)
        self.tables = self.packed.tables
        self.clear()

    def clear(self) -> None:
        """Forget the gradients of the last step."""
        self.gradients: list[torch.Tensor | None] = [None] * len(self.params)
        self.waiting = len(self.params)
        self.sent = False
        self.absent: set[int] = set()
        self.forget()
        for piece in self.owned:
            piece.grad = None

    def present(self) -> list[torch.Tensor]:
        """Return the parameters for which any rank had a gradient."""
        return [p for i, p in enumerate(self.params) if i not in self.absent]

    def __str__(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} ... {self.names[-1]}"

    def part(self, piece: BucketPiece, own: torch.Tensor) -> torch.Tensor:
        """Return the elements of one of this rank's pieces in `own`, this rank's slice of a flat buffer."""
        start = piece.start - self.own.start
        return own[start : start + piece.elements]

    def forget(self) -> None:
        """Drop what was measured and not packed, and the tallies."""
        self.packed.forget()
        self.averaged.forget()

    def unflatten(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return one payload per parameter from the flat buffer, in the parameter's shape: a view if the parameter is not cut."""
        parts: list[list[tuple[int, torch.Tensor]]] = [[] for _ in self.params]
        for piece in self.pieces:
            parts[piece.index].append((piece.row, flat[piece.start : piece.start + piece.elements]))
        payloads = []
        for p, pieces in zip(self.params, parts, strict=True):
            ordered = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
            whole = ordered[0] if len(ordered) == 1 else torch.cat([as_bytes(piece) for piece in ordered]).view(flat.dtype)
            payloads.append(whole.view(p.shape))
        return payloads


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View a flat contiguous tensor as uint8, which every backend can send and every device can concatenate, unlike FP8."""
    return x.view(torch.uint8)


class GuessedPack:
    """Packs pieces of the same tensors into a flat buffer, step after step, with one read of each tensor instead of two.

    The factors follow from the tensors' amaxes; they are powers of two, and usually those of the step before. So `measure`, which reads the
    tensors for their amaxes, packs them in the same read with the last factors as a guess, and `pack`, which gets the right factors, packs
    again only the tensors for which the guess was wrong. The result does not depend on the guess. A bucket has two of these: one for its
    gradients, one for the mean over the ranks.

    Args:
        pieces: as for `ops.pack`; together they fill the buffer.
        tensors: number of tensors.
        device: of the tensors.
        tallied: whether pieces into E4M3 are also tallied (`ops.pack`), for the gradient norm.

    Attributes:
        pieces: as passed.
        tables: of the launches.
    """

    def __init__(self, pieces: Sequence[FlatPiece], tensors: int, device: torch.device, *, tallied: bool) -> None:
        self.pieces, self.tables = pieces, Tables(device)
        self._elements = sum(elements for _, _, elements, _ in pieces)
        self._tallied = tallied
        # The last step's factors, always in the same memory, since CUDA graphs read and write them.
        self._guess = torch.ones(tensors, device=device, dtype=torch.float32)
        self._tensor_of_piece = torch.tensor([tensor for tensor, *_ in pieces], dtype=torch.int64, device=device)
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
        tallies = torch.zeros(2, len(self.pieces), TALLY, dtype=torch.int64, device=flat.device) if tallied else None
        first = None if tallies is None else tallies[0]
        ops.pack(self.tables, xs, self.pieces, flat, self._guess, amaxes=amaxes, tallies=first, ranks=ranks, divisor=ranks)
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
            ops.pack(self.tables, xs, self.pieces, flat, factor, ranks=ranks, divisor=ranks)
            return flat
        flat, tallies = guessed.flat, guessed.tallies
        again = None if tallies is None else tallies[1]
        ops.pack(self.tables, xs, self.pieces, flat, factor, tallies=again, unless=self._guess, ranks=ranks, divisor=ranks)
        if tallies is not None:
            right = (factor == self._guess)[self._tensor_of_piece]
            self._tally = Tally(torch.where(right.unsqueeze(1), tallies[0], tallies[1]), flat)
        self._guess.copy_(factor)
        return flat

    def tallies(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Return the tallies of each piece of the buffer that `pack` returned last, int64 [pieces, 3].

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
