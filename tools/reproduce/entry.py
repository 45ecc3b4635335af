"""Entries: the tables and figures that `python -m tools.reproduce` knows, read from `entries/PAPER.toml`.

A table of these files has the attributes of `Entry`: what the paper claims, the function that measures it, what each size requires, and
the verdict on the results. The numbers that a paper prints are in `papers.toml`.
"""

import functools
import importlib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tools.bench.rows import ROOT

PAPERS = ("fp8lm", "collage", "coat", "slides")
BY_LOSSES = "by its losses"
VERDICTS = ("holds", "holds in part", "does not hold", "not shown", "not comparable", BY_LOSSES, "not run")
NOT_RUN = VERDICTS[-1]
NOT_MEASURED = "not measured"  # `ours` next to a number of the paper that no run here can be compared with
WHOLE = "whole"  # the piece of an entry that is not divided


@dataclass(frozen=True)
class Finding:
    """One result, a number or a word.

    Attributes:
        quantity: what it is. With `x` it names a curve.
        ours: our result.
        paper: the paper's value; None if it gives none.
        unit: unit of both.
        x: position on the curve; None for a line of the table.
        seed: seed of the training run.
        where: columns of the result that this was taken from (date, commit, gpu, driver, torch); empty if it was measured now, on this
            machine.
    """

    quantity: str
    ours: float | str
    paper: float | str | None = None
    unit: str = ""
    x: float | None = None
    seed: int | None = None
    where: Mapping[str, str] = field(default_factory=dict)


def training(name: str, course: Iterable[tuple[float, float]], valid: float, seed: int) -> Iterator[Finding]:
    """Yield a training run of a byte model: the curve of its training loss from (step, loss), and its validation loss."""
    for step, loss in course:
        yield Finding(f"{name}, training loss", loss, x=step, seed=seed)
    yield Finding(f"{name}: validation loss", valid, unit="nats per byte", seed=seed)


class Axes(NamedTuple):
    """Labels of a figure's axes, with units, and those with a logarithmic scale: "", "x", "y" or "xy"."""

    x: str = "step"
    y: str = "training loss, nats per token"
    log: str = ""


STEPS = Axes()


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a size of an entry requires.

    Attributes:
        gpus: number of GPUs on one host; 0 for a CPU.
        gib: memory of each GPU.
        minutes: approximate time of the whole entry.
        files: required folders or files, relative to the root of the checkout.
        text: it trains on the text of --text and its results are published, so that the default text must be one that later trees contain
            too.
        computed: its results follow from definitions, shapes and recorded results alone, the same on every machine: `--recompute` reruns
            them, and a test compares those on file.
    """

    gpus: int = 0
    gib: int = 0
    minutes: float = 0.1
    files: Sequence[str] = ()
    text: bool = False
    computed: bool = False

    def lacking(self, root: Path = ROOT) -> str:
        """Return what this machine lacks; an empty string if it lacks nothing."""
        have = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if have < self.gpus:
            return f"{self.gpus} GPU(s); this machine has {have}"
        # A card reports a little less than its nominal memory.
        if self.gpus and torch.cuda.get_device_properties(0).total_memory < self.gib * 2**30 * 0.95:
            return f"GPUs of {self.gib} GiB"
        missing = [name for name in self.files if not (root / name).exists()]
        return f"{', '.join(missing)} (docs/results/commands.md has what makes it)" if missing else ""

    def __str__(self) -> str:
        where = f"{self.gpus} GPU(s) of {self.gib} GiB" if self.gpus else "CPU"
        time = f"{self.minutes:g} min" if self.minutes >= 1 else "seconds"
        return ", ".join([where, time, *self.files])


@dataclass(frozen=True)
class Task:
    """One piece of an entry, to be run.

    Attributes:
        size: a key of the entry's `sizes`.
        piece: one of its `pieces_of(size)`.
        text: UTF-8 file that small trainings read, byte by byte.
        folder: cache for files that take long to create, kept between pieces and calls.
        commit: hash to record if the tree is not a git checkout.
    """

    size: str
    piece: str
    text: Path
    folder: Path
    commit: str | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A table or figure of a paper.

    Attributes:
        name: its name on the command line, and of its CSV and page.
        title: the paper, and the table or figure.
        claim: what the paper concludes from it, in a sentence.
        run: the function that returns the findings of a `Task`, or its name in this folder, `MODULE.FUNCTION`; `queries.NAME NAME ..`:
            queries of `findings.toml`.
        sizes: from the smallest to the largest, with what each requires; `toy`, if defined, takes seconds on a CPU.
        pieces: the pieces of the sizes that are divided; the results of each are written when it ends.
        headline: the quantity shown in the overview.
        setting: how it was measured.
        limits: what the results do not show, and why.
        apart: every piece runs in its own process, and other work on the machine does not change its results.
        slow: `toy` takes too long for the default tests.
        same_loss: pairs of quantities, (baseline, other), whose losses are equal according to the claim; compared by seed
            (`megatron.lm.evaluation.paired_difference`). Unless all of them hold, the verdict cannot be "holds". An entry with another
            verdict may name further pairs, whose intervals its page shows.
        axes: of the figure, if findings have an `x`.
        drawn: words that the names of the figure's curves contain; all curves contain the empty ones.
        verdict: one of `VERDICTS`; the last for an entry without results. "not comparable": the run differs from the claim in a condition
            that decides the number. `BY_LOSSES` for a claim of equal losses, which `keep.verdict` judges for each baseline: "does
            not hold" if one of its pairs is above or below, "holds" if all hold, "holds in part" if some do, else "not shown".
        judged: size of the results that the verdict is about; for others it must be revised.
        agree: where our results and the paper's agree, and where not. It contains no measured number.
        cause: cause of the difference, as far as known.
    """

    name: str
    title: str
    claim: str
    run: str | Callable[[Task], Iterable[Finding]]
    sizes: Mapping[str, Needs]
    pieces: Mapping[str, Sequence[str]] = field(default_factory=dict)
    headline: str = ""
    setting: str = ""
    limits: str = ""
    apart: bool = False
    slow: bool = False
    same_loss: Sequence[Sequence[str]] = ()
    axes: Axes = STEPS
    drawn: str = ""
    verdict: str = NOT_RUN
    judged: str = ""
    agree: str = ""
    cause: str = ""

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError(f"{self.name} has no size: define one, with what it requires")
        if self.verdict not in VERDICTS:
            raise ValueError(f"{self.name}: verdict {self.verdict!r} is invalid; choose one of {', '.join(VERDICTS)}")

    def findings(self, task: Task) -> Iterable[Finding]:
        """Run a piece and return its findings."""
        if callable(self.run):
            return self.run(task)
        module, _, function = self.run.partition(".")
        loaded = importlib.import_module(f"tools.reproduce.{module}")
        found: Iterable[Finding] = loaded.findings(*function.split()) if module == "queries" else getattr(loaded, function)(task)
        return found

    def pieces_of(self, size: str) -> Sequence[str]:
        """Return the pieces of a size."""
        return self.pieces.get(size, (WHOLE,))

    def largest(self) -> str:
        """Return the largest size that fits this machine.

        Raises:
            ValueError: none fits.
        """
        for size, needs in reversed(list(self.sizes.items())):
            if not needs.lacking():
                return size
        raise ValueError(f"{self.name} needs {next(iter(self.sizes.values())).lacking()}: run it there")


def _entries() -> Iterator[Entry]:
    for paper in PAPERS:
        for name, given in tomllib.loads((Path(__file__).parent / f"entries/{paper}.toml").read_text(encoding="utf-8")).items():
            sizes = {size: Needs(**needs) for size, needs in given["sizes"].items()}
            yield Entry(**{**given, "name": name, "sizes": sizes, "axes": Axes(**given.get("axes", {}))})


ENTRIES: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _entries()})


@functools.cache
def paper(name: str) -> Any:
    """Return the numbers that a paper prints: a table of `papers.toml`, such as "fp8lm.table5"."""
    numbers: Any = tomllib.loads((Path(__file__).parent / "papers.toml").read_text(encoding="utf-8"))
    for part in name.split("."):
        numbers = numbers[part]
    return numbers
