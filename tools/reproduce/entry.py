"""What a reproduced table or figure is: a row of the registry, and a function that gives its findings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tools.bench.rows import ROOT

NOT_MEASURED = "not measured"  # ours, next to a number of the paper's that no run here can be compared with
WHOLE = "whole"  # the piece of an entry that is not cut


@dataclass(frozen=True)
class Finding:
    """One number or word that was found.

    Attributes:
        quantity: what it is. With `x` it names a curve.
        ours: what was found here.
        paper: what the paper says; None where it says nothing of this quantity.
        unit: of both.
        x: where it lies on the curve; None: it is a line of the table.
        seed: of the training behind it.
        where: columns of the row that this was taken from (date, commit, gpu, driver, torch); empty: it was measured now and here.
    """

    quantity: str
    ours: float | str
    paper: float | str | None = None
    unit: str = ""
    x: float | None = None
    seed: int | None = None
    where: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a size of an entry takes.

    Attributes:
        gpus: on one host; 0: none.
        gib: of memory on each of them.
        minutes: about, of the whole entry.
        files: folders or files, from the root of the checkout, that have to be there.
        maker: what makes them.
        text: it trains on the text of --text, and its measurements are published: the default text must be one that later trees have too.
    """

    gpus: int = 0
    gib: int = 0
    minutes: float = 0.1
    files: tuple[str, ...] = ()
    maker: str = "megatron.lm.tools.prepare_text makes data"
    text: bool = False

    def lacking(self, root: Path = ROOT) -> str:
        """What this machine has not; empty where it has all."""
        have = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if have < self.gpus:
            return f"{self.gpus} GPU(s), and {have} are here"
        if self.gpus and torch.cuda.get_device_properties(0).total_memory < self.gib * 2**30 * 0.95:  # what a card of so many GiB shows
            return f"GPUs of {self.gib} GiB"
        missing = [name for name in self.files if not (root / name).exists()]
        return f"{', '.join(missing)} ({self.maker})" if missing else ""

    def __str__(self) -> str:
        where = f"{self.gpus} GPU(s) of {self.gib} GiB" if self.gpus else "CPU"
        time = f"{self.minutes:g} min" if self.minutes >= 1 else "seconds"
        return ", ".join([where, time, *self.files])


@dataclass(frozen=True)
class Task:
    """One piece of an entry to be run.

    Attributes:
        size: a key of the entry's `sizes`.
        piece: one of its `pieces(size)`.
        text: file that small trainings read, byte by byte; UTF-8.
        folder: for files that take long to make, kept from piece to piece and from call to call.
        commit: hash to record where the tree is not a git checkout.
    """

    size: str
    piece: str
    text: Path
    folder: Path
    commit: str | None = None


def one_piece(size: str) -> Sequence[str]:
    """The pieces of an entry that is not cut."""
    return (WHOLE,)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A table or figure of a paper.

    Attributes:
        name: on the command line, of its CSV and of its page.
        title: the paper, and which table or figure.
        claim: what the paper says with it, in a sentence.
        run: gives the findings of a piece.
        sizes: from the smallest to the largest, with what each needs; `toy`, where there is one, takes seconds on a CPU.
        pieces: of a size, each of which is kept as soon as it is there.
        headline: the quantity that stands for all in the overview.
        reason: why there is no result at a larger size.
        apart: every piece is a process of its own, and what else runs does not change its figures.
        slow: `toy` takes too long for the default tests.
        same_loss: pairs of quantities, (baseline, other), of which the claim says that their losses are equal; compared by seed. Where the
            95 % interval is wider than `megatron.lm.evaluation.paired_difference.EFFECT`, the verdict cannot be "holds".
    """

    name: str
    title: str
    claim: str
    run: Callable[[Task], Iterable[Finding]]
    sizes: Mapping[str, Needs]
    pieces: Callable[[str], Sequence[str]] = one_piece
    headline: str = ""
    reason: str = ""
    apart: bool = False
    slow: bool = False
    same_loss: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError(f"{self.name} has no size: give one, with what it needs")

    def largest(self) -> str:
        """The largest size that this machine can take.

        Raises:
            ValueError: it can take none.
        """
        for size, needs in reversed(list(self.sizes.items())):
            if not needs.lacking():
                return size
        raise ValueError(f"{self.name} needs {next(iter(self.sizes.values())).lacking()}: run it there")
