"""Cells and tables: how a row becomes a line of Markdown, and what stands below a table."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.docs.evidence import PREDICTED, Row, marked, read

BENCH, REPRODUCE = "tools/bench/results", "tools/reproduce/results"
PRECISIONS = f"{REPRODUCE}/precisions/precisions.csv"
PEERS = {
    "megatron bf16": "Megatron-core + TE, BF16",
    "megatron te-delayed": "Megatron-core + TE, FP8 delayed",
    "megatron te-tensorwise": "Megatron-core + TE, FP8 tensorwise",
    "megatron te-blockwise": "Megatron-core + TE, FP8 blockwise",
    "torchao bf16": "torch.compile, BF16",
    "torchao ao-tensorwise": "torch.compile + torchao, FP8 tensorwise",
    "torchao ao-rowwise": "torch.compile + torchao, FP8 rowwise",
    "llama bf16": "torch.compile, BF16",
    "llama ao-tensorwise": "torch.compile + torchao, FP8 tensorwise",
}
MARK = " †"


@dataclass(frozen=True)
class Table:
    """A table to publish: its cells, and the rows they were made of by file.

    Attributes:
        columns, cells: as Markdown.
        sources: file and rows; their commits are proven.
        told: what is below the table; derived from the sources where it is empty.
        note: a sentence after it.
    """

    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    sources: Sequence[tuple[str, Sequence[Row]]]
    told: str = ""
    note: str = ""

    def markdown(self) -> str:
        """The table, and below it where its numbers were measured."""
        lines = [self.columns, ["---"] * len(self.columns), *self.cells]
        told = " ".join(part for part in (self.told or self._told(), self.note) if part)
        return "\n".join([*("| " + " | ".join(cells) + " |" for cells in lines), "", *textwrap.wrap(told, 118)])

    def _told(self) -> str:
        told = []
        for name, rows in self.sources:
            facts = [sorted({row[key] for row in rows if row.get(key)}) for key in ("commit", "gpu", "torch", "date")]
            commits, *rest = (", ".join(values) for values in facts)
            computed = "predicted" if name == PREDICTED else "computed from shapes"
            where = [f"commit {commits}" if commits else computed, *(fact for fact in rest if fact)]
            told.append(f"`{name}`, {', '.join(where)}.")
            if any(marked(row) for row in rows):
                told.append("† Measured on a tree that the history does not have.")
        return " ".join(told)


Cell = Callable[[Row], str]


def column(key: str, digits: int | None = None, scale: float = 1.0, unit: str = "") -> Cell:
    """The value under `key`, as it stands or with so many digits; empty where there is none."""

    def cell(row: Row) -> str:
        value = row.get(key, "")
        return value if digits is None or not value else f"{float(value) * scale:.{digits}f}{unit}"

    return cell


def kilo(key: str) -> Cell:
    """Thousands with one digit."""
    return column(key, 1, 1e-3, "k")


def code(key: str) -> Cell:
    """The value under `key` as code."""
    return lambda row: f"`{row[key]}`" if row[key] else ""


def case(row: Row) -> str:
    """What was measured: a peer by its name, ours as the flags say it."""
    return PEERS.get(row["case"]) or f"`{row['case']}`"


def pick(name: str, keep: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """The rows of a file that `keep` admits.

    Raises:
        ValueError: there is none.
    """
    rows = [row for row in read(name) if keep(row)]
    if not rows:
        raise ValueError(f"{name} has no row for a published table: tools/docs names a run that is not there")
    return rows


def of(name: str, rows: Sequence[Row], columns: dict[str, Cell]) -> Table:
    """One line a row; a row on which no tree can be had again has a mark."""
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    for line, row in zip(cells, rows, strict=True):
        line[0] += MARK if marked(row) else ""
    return Table(list(columns), cells, [(name, rows)])


@dataclass(frozen=True)
class Listing:
    """Lines that a command prints, to publish as a block of text."""

    lines: Sequence[str]
    sources: Sequence[tuple[str, Sequence[Row]]] = ()

    def markdown(self) -> str:
        """The block."""
        return "\n".join(["```text", *self.lines, "```"])


@dataclass(frozen=True)
class Absent:
    """What stands in the place of a table as long as its file is not there.

    Attributes:
        file: that the table is made of.
    """

    file: str
    sources: Sequence[tuple[str, Sequence[Row]]] = ()

    def markdown(self) -> str:
        """One line."""
        return f"No GPU measurement is recorded for the table of {self.file.rpartition('/')[2].removesuffix('.csv').replace('_', ' ')}."


@dataclass(frozen=True)
class Sentence:
    """A paragraph with numbers from rows, and below it where they were measured, as below a table."""

    text: str
    sources: Sequence[tuple[str, Sequence[Row]]]

    def markdown(self) -> str:
        """The paragraph."""
        return "\n".join(textwrap.wrap(f"{self.text} {Table((), (), self.sources)._told()}", 118))
