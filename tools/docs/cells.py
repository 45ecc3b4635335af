"""Cells and tables: convert rows to lines of Markdown, and write what is below a table."""

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
    """A table to publish: its cells, and the rows that they come from, by file.

    Attributes:
        columns, cells: as Markdown.
        sources: file and rows; their commits are proven.
        footer: text below the table; derived from the sources if empty.
        note: a sentence after it.
    """

    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    sources: Sequence[tuple[str, Sequence[Row]]]
    footer: str = ""
    note: str = ""

    def markdown(self) -> str:
        """Return the table, and below it where its numbers were measured."""
        lines = [self.columns, ["---"] * len(self.columns), *self.cells]
        below = " ".join(part for part in (self.footer or self._provenance(), self.note) if part)
        return "\n".join([*("| " + " | ".join(cells) + " |" for cells in lines), "", *textwrap.wrap(below, 118)])

    def _provenance(self) -> str:
        sentences = []
        for name, rows in self.sources:
            facts = [sorted({row[key] for row in rows if row.get(key)}) for key in ("commit", "gpu", "torch", "date")]
            commits, *rest = (", ".join(values) for values in facts)
            computed = "predicted" if name == PREDICTED else "computed from shapes"
            where = [f"commit {commits}" if commits else computed, *(fact for fact in rest if fact)]
            sentences.append(f"`{name}`, {', '.join(where)}.")
            if any(marked(row) for row in rows):
                sentences.append("† Measured on a tree that is not in the history.")
        return " ".join(sentences)


Cell = Callable[[Row], str]


def column(key: str, digits: int | None = None, scale: float = 1.0, unit: str = "") -> Cell:
    """Return a cell with the value under `key`, unchanged or with `digits` digits; empty if there is none."""

    def cell(row: Row) -> str:
        value = row.get(key, "")
        return value if digits is None or not value else f"{float(value) * scale:.{digits}f}{unit}"

    return cell


def kilo(key: str) -> Cell:
    """Return a cell in thousands with one digit."""
    return column(key, 1, 1e-3, "k")


def code(key: str) -> Cell:
    """Return a cell with the value under `key` as code."""
    return lambda row: f"`{row[key]}`" if row[key] else ""


def speed_columns() -> dict[str, Cell]:
    """Return the columns of a table of steps: case, time, memory and commit."""
    return {"case": code("case"), "ms/step": column("ms", 1), "peak GiB": column("peak_gib", 1), "commit": column("commit")}


def case(row: Row) -> str:
    """Return what was measured: the name of a baseline, or our flags."""
    return PEERS.get(row["case"]) or f"`{row['case']}`"


def pick(name: str, keep: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return the rows of a file that `keep` accepts.

    Raises:
        ValueError: there are none.
    """
    rows = [row for row in read(name) if keep(row)]
    if not rows:
        raise ValueError(f"{name} has no row for a published table: tools/docs names a run that does not exist")
    return rows


def newest(rows: Sequence[Row], *keys: str) -> list[Row]:
    """Return, of the rows with the same values under `keys`, the last; all in their order."""
    last = {tuple(row[key] for key in keys): number for number, row in enumerate(rows)}
    return [rows[number] for number in sorted(last.values())]


def of(name: str, rows: Sequence[Row], columns: dict[str, Cell]) -> Table:
    """Return a table with a line per row; rows whose tree is not available are marked."""
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    for line, row in zip(cells, rows, strict=True):
        line[0] += MARK if marked(row) else ""
    return Table(list(columns), cells, [(name, rows)])


@dataclass(frozen=True)
class Listing:
    """Lines printed by a command, published as a block of text."""

    lines: Sequence[str]
    sources: Sequence[tuple[str, Sequence[Row]]] = ()

    def markdown(self) -> str:
        """Return the block."""
        return "\n".join(["```text", *self.lines, "```"])


@dataclass(frozen=True)
class Absent:
    """A placeholder for a table whose file does not exist yet.

    Attributes:
        file: source of the table.
    """

    file: str
    sources: Sequence[tuple[str, Sequence[Row]]] = ()

    def markdown(self) -> str:
        """Return one line."""
        return f"No GPU measurement is recorded for the table of {self.file.rpartition('/')[2].removesuffix('.csv').replace('_', ' ')}."


@dataclass(frozen=True)
class Sentence:
    """A paragraph with numbers from rows, followed by where they were measured, as below a table."""

    text: str
    sources: Sequence[tuple[str, Sequence[Row]]]

    def markdown(self) -> str:
        """Return the paragraph."""
        text = f"{self.text} {Table((), (), self.sources)._provenance()}"
        return "\n".join(textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False))  # an address stays whole
