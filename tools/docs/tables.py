"""Tables of the documentation: SQL over the recorded rows, written into the pages.

`tables.toml` has a query per table, in which `{NAME}` is a template or a value of its own; one that names commits or is cut off says why
in `chosen`, a sentence below it. A page that contains

    <!-- table: NAME -->
    <!-- end -->

gets the result between the two lines. A CSV file below `tools/bench/results` or `tools/reproduce/results` is a table of SQLite, by its path
without the ending: `SELECT ms FROM "bench/step"`, all columns text. A query's columns are those of the published table. A column that is
called `text` becomes paragraphs instead, and the column `_` is not shown: it has the places of the measurements, by `at` of one row or
`ats` of a group, which are listed below the table and whose commits must be in the history.

Functions besides SQLite's: fixed(x, digits), kilo(x), code(text), at(commit, gpu, torch, date), without(text, flags), run_of(precision);
aggregates: ats, median(x), half_width(x), of the 95 % interval of a mean, cost(tokens, base, other), in which `base` falls by the distance,
covers(base, other, curve), % of its tokens in which a curve (JSON of tokens and losses) does, paired(base, other[, unit]), the difference
of paired losses in percent with its 95 % interval, the seeds above and the verdict.
"""

import functools
import json
import re
import sqlite3
import statistics
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.lm.evaluation.paired_difference import cost_in_tokens, interval, paired_difference
from tools.docs.evidence import DIRTY, UNKNOWN
from tools.measurements import ROOT, read

FOLDERS = {"bench": "tools/bench/results", "reproduce": "tools/reproduce/results"}
SOURCE = re.compile(r'"((bench|reproduce)/[\w./-]+)"')
MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
MARK = " †"
WIDTH = 118  # columns of a paragraph


class Measured(NamedTuple):
    """Where and when rows were measured."""

    commit: str
    gpu: str
    torch: str
    date: str


class Table(NamedTuple):
    """A published table.

    Attributes:
        columns, cells: as Markdown.
        files: paths of the CSV files that it was made of.
        places: where their rows were measured.
        note: a sentence below it.
    """

    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    files: Sequence[str] = ()
    places: Sequence[Measured] = ()
    note: str = ""

    def markdown(self) -> str:
        """Return the table, or its paragraphs, and below it where its numbers were measured."""
        below = " ".join(part for part in (self._provenance(), self.note) if part)
        if self.columns == ["text"]:
            return wrapped(" ".join([*(cells[0] for cells in self.cells), below]))
        lines = [self.columns, ["---"] * len(self.columns), *self.cells]
        return "\n".join([*("| " + " | ".join(cells) + " |" for cells in lines), "", wrapped(below)])

    def _provenance(self) -> str:
        facts = [", ".join(sorted(set(values) - {""})) for values in zip(*self.places, strict=True)]
        names = " and ".join(f"`{file}`" for file in self.files)
        if not names:
            return ""
        where = ", ".join(fact for fact in [names, f"commit {facts[0]}" if facts and facts[0] else "", *facts[1:]] if fact)
        marked = any(place.commit.endswith((DIRTY, UNKNOWN)) for place in self.places)
        return f"{where}." + (f"{MARK} Measured on a tree that is not in the history." if marked else "")


def wrapped(text: str) -> str:
    """Return a paragraph in lines in which links stay whole."""
    return "\n".join(textwrap.wrap(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False))


# ----------------------------------------------------------------------------------------------------------------------------- SQL


def _number(text: Any) -> float | None:
    return None if text in (None, "") else float(text)


def _without(text: str, flags: str) -> str:
    """Return a case without these flags and their values."""
    for flag in flags.split():
        text = re.sub(rf"{flag}( [^-]\S*)?( |$)", "", text)
    return text.strip()


class _Aggregate:
    """An aggregate of SQLite: collects the arguments of each row."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    def step(self, *values: Any) -> None:
        self.rows.append(values)


class _Places(_Aggregate):
    def finalize(self) -> str:
        return "\n".join(dict.fromkeys("|".join(map(str, row)) for row in self.rows))


class _Median(_Aggregate):
    def finalize(self) -> float | None:
        values = [value for (x,) in self.rows if (value := _number(x)) is not None]
        return statistics.median(values) if values else None


class _HalfWidth(_Aggregate):
    def finalize(self) -> float | None:
        return interval([float(x) for (x,) in self.rows]).half_width


class _Paired(_Aggregate):
    def finalize(self) -> str:
        pairs = [(float(base), float(other)) for base, other, *_ in self.rows if base not in (None, "") and other not in (None, "")]
        if not pairs:
            return ""
        base, other = (dict(enumerate(losses)) for losses in zip(*pairs, strict=True))
        paired = paired_difference(base, other, *self.rows[0][2:])
        low, high = (100 * end for end in paired.relative.ends)
        mean = f"{100 * paired.relative.mean:+.2f}"
        if len(pairs) == 1:
            return f"{mean} (one seed)"
        return f"{mean} ({low:+.2f} to {high:+.2f}), {paired.above} of {len(pairs)}: {paired.verdict()}"


class _Cost(_Aggregate):
    def finalize(self) -> str:
        tokens, base, other = zip(*(map(float, row) for row in self.rows), strict=True)
        fall = -statistics.linear_regression(tokens, base).slope if len(set(tokens)) > 1 else 0
        return f"{(statistics.fmean(other) - statistics.fmean(base)) / fall / 1e6:.1f}M tokens" if fall > 0 else ""


class _Covers(_Aggregate):
    def finalize(self) -> str:
        share = cost_in_tokens(statistics.fmean(float(other) - float(base) for base, other, _ in self.rows), json.loads(self.rows[0][2]))
        return "" if share is None else f"{100 * share:.1f}"


@functools.cache
def _database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    for name, arguments, function in (
        ("fixed", 2, lambda x, digits: "" if (value := _number(x)) is None else f"{value:.{digits}f}"),
        ("kilo", 1, lambda x: "" if (value := _number(x)) is None else f"{value / 1000:.1f}k"),
        ("code", 1, lambda text: f"`{text}`" if text else ""),
        ("at", 4, lambda *place: "|".join(map(str, place))),
        ("without", 2, _without),
        ("run_of", 1, lambda precision: re.sub(r"[\s-]+", "-", precision)),
    ):
        connection.create_function(name, arguments, function, deterministic=True)
    connection.create_aggregate("ats", 4, _Places)  # type: ignore[arg-type]
    connection.create_aggregate("median", 1, _Median)  # type: ignore[arg-type]
    connection.create_aggregate("half_width", 1, _HalfWidth)  # type: ignore[arg-type]
    connection.create_aggregate("paired", -1, _Paired)  # type: ignore[arg-type]
    connection.create_aggregate("cost", 3, _Cost)  # type: ignore[arg-type]
    connection.create_aggregate("covers", 3, _Covers)  # type: ignore[arg-type]
    return connection


def _files(query: str) -> list[str]:
    """Load the CSV files that a query names; return their paths."""
    paths = []
    for name, folder in dict.fromkeys(SOURCE.findall(query)):
        path = f"{FOLDERS[folder]}/{name.partition('/')[2]}.csv"
        rows = read(path)
        if not _database().execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone():
            columns = ", ".join(f'"{column}" TEXT' for column in rows[0])
            _database().execute(f'CREATE TABLE "{name}" ({columns})')
            _database().executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(rows[0]))})', [tuple(row.values()) for row in rows])
        paths.append(path)
    return paths


def select(query: str, note: str = "") -> Table:
    """Return the result of a query as a table.

    Raises:
        ValueError: it has no row, or is not valid SQL.
    """
    files = _files(query)
    try:
        cursor = _database().execute(query)
    except sqlite3.Error as error:
        raise ValueError(f"{error} in the query {' '.join(query.split())}") from None
    names = [column[0] for column in cursor.description]
    cells: list[list[str]] = []
    places: list[Measured] = []
    for values in cursor:
        row = dict(zip(names, ("" if value is None else str(value) for value in values), strict=True))
        own = [Measured(*line.split("|")) for line in row.pop("_", "").splitlines()]
        shown = [value for name, value in row.items() if not name.startswith("_")]
        if any(place.commit.endswith((DIRTY, UNKNOWN)) for place in own) and list(row) != ["text"]:
            shown[0] += MARK
        cells.append(shown)
        places += own
    if not cells:
        raise ValueError(f"no row of {', '.join(files)} is selected by {' '.join(query.split())}")
    return Table([name for name in names if not name.startswith("_")], cells, files, places, note)


@functools.cache
def specifications() -> Mapping[str, Mapping[str, Any]]:
    """Return `tables.toml`: name -> `query`, `note` and values of the query; templates, by name."""
    given: dict[str, Any] = tomllib.loads((Path(__file__).parent / "tables.toml").read_text(encoding="utf-8"))
    return given


def table(name: str) -> Table:
    """Return a table by its name.

    Raises:
        ValueError: there is no such table.
    """
    known = specifications()
    if name not in known or name == "templates":
        raise ValueError(f"table {name!r} is unknown: tools/docs/tables.toml has {', '.join(sorted(known))}")
    one = dict(known[name])
    note = " ".join(one.pop(key) for key in ("note", "chosen") if key in one)
    query = one.pop("query")
    for key, value in {**known["templates"], **one}.items():
        query = query.replace("{" + key + "}", value)
    return select(query, note)


def filled(text: str, page: str, more: Mapping[str, str] | None = None) -> str:
    """Return a page with each marked table filled from the current results, or from `more`, Markdown by name. `page`: its name in messages.

    Raises:
        ValueError: a table does not exist, or a marker has no end.
    """

    def current(match: re.Match[str]) -> str:
        markdown = (more or {}).get(match[2]) or table(match[2]).markdown()
        return f"{match[1]}\n{markdown}\n\n{match[4]}"

    if text.count("<!-- table: ") != len(MARKED.findall(text)):
        raise ValueError(f"{page} has a marker <!-- table: NAME --> without <!-- end -->: close it")
    return MARKED.sub(current, text)


def pages(root: Path = ROOT) -> list[Path]:
    """Return the pages that may contain tables."""
    return [root / "README.md", *sorted(path for path in (root / "docs").rglob("*.md") if "_build" not in path.parts)]
