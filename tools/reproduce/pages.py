"""Generate the pages of `python -m tools.reproduce`, one per entry with results and an overview, from the entries and their results."""

import functools
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.lm.config.blend_file import number_of
from megatron.lm.evaluation.paired_difference import EFFECT, HOLDS
from tools.docs.drawing import draw_panels
from tools.docs.evidence import ROOT, Row, marked
from tools.docs.figures import Figure
from tools.docs.tables import Table
from tools.reproduce import keep
from tools.reproduce.entry import ENTRIES, NOT_MEASURED, NOT_RUN, Entry

PAGES = "docs/reproduction"
WIDTH = 118  # columns of a paragraph


def published(one: Entry, root: Path = ROOT) -> tuple[str, list[Row], list[str]]:
    """Return the largest size of an entry that has results, its rows, and the missing pieces; ("", [], []) without results.

    Raises:
        ValueError: there are rows without a verdict for their size, a verdict without rows, or one that the losses do not allow.
    """
    results = keep.read(root / keep.RESULTS / f"{one.name}.csv")
    size, rows = keep.largest(one, results)
    if one.judged != size or (one.verdict == NOT_RUN) != (not size):
        raise ValueError(
            f"{one.name}: the verdict is {one.verdict!r} for size {one.judged!r}, and its rows are of size {size!r}: compare it with the "
            "rows, and set `judged`"
        )
    if one.verdict == HOLDS:
        equal = {(base, other) for base, other, difference in keep.loss_differences(one, rows) if difference.verdict() == HOLDS}
        undecided = [other for base, other in one.same_loss if (base, other) not in equal]
        if undecided:
            raise ValueError(
                f"{one.name}: the verdict is {HOLDS!r}, but the 95 % interval of {undecided[0]!r} is not within {100 * EFFECT:g} % of its "
                "baseline: write 'too small to say', or 'holds in part' and what holds"
            )
    return size, rows, keep.missing(one, size, results) if size else []


def difference(row: Row) -> str:
    """Return how ours differs from the paper's: percent for numbers, `same` or `differs` for words; empty if the paper or the run gives no
    value."""
    if not row["paper"] or row["ours"] == NOT_MEASURED:
        return ""
    try:
        ours, paper = float(row["ours"]), float(row["paper"])
    except ValueError:
        return "same" if row["ours"] == row["paper"] else "differs in kind" if number_of(row["ours"]) is not None else "differs"
    return f"{ours - paper:+.3g}" if not paper or row["unit"] == "%" else f"{100 * (ours / paper - 1):+.1f} %"


def _short(text: str) -> str:
    return f"{float(text):.4g}" if number_of(text) is not None else text


def source(one: Entry) -> str:
    """Return the path of an entry's rows."""
    return f"{keep.RESULTS}/{one.name}.csv"


def table(one: Entry, rows: Sequence[Row]) -> Table:
    """Return a table of ours, the paper's and the difference, a line per quantity."""
    lines = [row for row in rows if not row["x"]]
    cells = [
        [
            row["quantity"] + (" †" if marked(row) else ""),
            _short(row["ours"]),
            _short(row["paper"]),
            difference(row),
            row["unit"],
            row["seed"],
        ]
        for row in lines
    ]
    return Table(["quantity", "ours", "paper", "difference", "unit", "seed"], cells, [(source(one), lines)])


def measured(rows: Sequence[Row]) -> tuple[str, str]:
    """Return on which devices and on which days rows were measured."""
    cards = sorted({row["gpu"].replace("NVIDIA ", "").removesuffix(" 80GB HBM3") for row in rows}, key=lambda card: (card == "cpu", card))
    first, last = (choose(row["date"] for row in rows) for choose in (min, max))
    return " and ".join("CPU" if card == "cpu" else card for card in cards), first if first == last else f"{first} to {last}"


def wrapped(text: str) -> list[str]:
    """Return the lines of a paragraph."""
    return textwrap.wrap(text, WIDTH)


def page(one: Entry, root: Path = ROOT) -> str:
    """Return the page of an entry with rows; empty without rows."""
    size, rows, missing = published(one, root)
    if not size:
        return ""
    seconds = sum({row["piece"]: float(row["seconds"]) for row in rows}.values())
    lines = [f"# {one.title}", "", *wrapped(f"The claim: {one.claim}"), "", f"**{one.verdict}**", "", *wrapped(one.agree), ""]
    if one.same_loss:
        lines += ["Losses, paired by seed:", "", *(f"- {line}." for line in keep.loss_sentences(one, rows)), ""]
    for label, text in (("Likely cause", one.cause), ("How it was measured", one.setting), ("Limits", one.limits)):
        lines += [*wrapped(f"{label}: {text}"), ""] if text else []
    took = "computed from measurements of other tools" if size == "kept" else f"{seconds:.0f} s"
    lines += ["```sh", rows[0]["command"], "```", "", f"Size `{size}`, {took}: {', '.join(measured(rows))}.", ""]
    if missing:
        lines += [*wrapped(f"Missing: {', '.join(f'`{piece}`' for piece in missing)}. The same command continues with them."), ""]
    if curves(rows):
        lines += [f"![{one.title}](../results/figures/{one.name}.png)", ""]
    return "\n".join([*lines, table(one, rows).markdown(), ""])


def pages(root: Path = ROOT) -> dict[str, str]:
    """Return the generated pages, by path from the root."""
    return {f"{PAGES}/{name}.md": text for name, one in ENTRIES.items() if (text := page(one, root))}


def overview() -> Table:
    """Return the overview of all entries: claim, the paper's number, ours, and the verdict."""
    cells, sources = [], []
    for name, one in ENTRIES.items():
        size, rows, missing = published(one)
        head = next((row for row in rows if row["quantity"] == one.headline), None)
        link = f"[{one.title}]({name}.md)" if size else one.title
        ours, paper = (
            ("", "") if head is None else (f"{_short(head[key])} {head['unit']}".strip() if head[key] else "" for key in ("ours", "paper"))
        )
        what = one.headline if size else one.limits or "It has not been run yet."
        verdict = one.verdict + (f"; {len(missing)} pieces missing" if missing else "")
        cells.append([link, one.claim, what, paper, ours, size, *(measured(rows) if rows else ("", "")), verdict])
        if rows:
            sources.append((source(one), rows))
    # The commits of so many files would fill a paragraph: each page lists its own.
    columns = ["table or figure", "claim", "quantity, or why not", "paper", "ours", "size", "device", "date", "verdict"]
    return Overview(columns, cells, sources)


class Overview(Table):
    """A table without a list of sources: each line links to a page that names them."""

    def markdown(self) -> str:
        """Return only the table."""
        lines = [self.columns, ["---"] * len(self.columns), *self.cells]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# --------------------------------------------------------------------------------------------------------------------- figures


def curves(rows: Sequence[Row]) -> dict[str, list[list[float]]]:
    """Return the curves of an entry: name -> x and y, of the first seed."""
    lines: dict[str, list[list[float]]] = {}
    first: dict[str, str] = {}
    for row in rows:
        if row["x"]:
            name = row["quantity"]
            if row["seed"] == first.setdefault(name, row["seed"]):
                xs, ys = lines.setdefault(name, [[], []])
                xs.append(float(row["x"]))
                ys.append(float(row["ours"]))
    return lines


MANY = 8  # curves in one panel, at most


def panels_of(drawn: Mapping[str, list[list[float]]]) -> dict[str, dict[str, list[list[float]]]]:
    """Split curves named `LABEL, WHAT` into panels: WHAT -> its curves by label.

    Up to `MANY` curves share a panel, under their whole names if they show different quantities. More have a panel per quantity.
    """
    panels: dict[str, dict[str, list[list[float]]]] = {}
    for name, curve in drawn.items():
        label, _, what = name.partition(", ")
        panels.setdefault(what, {})[label] = curve
    return panels if len(panels) == 1 or len(drawn) > MANY else {"": dict(drawn)}


def figures() -> dict[str, Any]:
    """Return, for each entry with curves in its rows, the function that makes its figure."""
    files = {}
    for name, one in ENTRIES.items():
        _, rows, _ = published(one)
        drawn = curves(rows)
        if drawn:
            numbers = json.loads(json.dumps({"panels": panels_of(drawn)} | one.axes._asdict()))
            files[name] = functools.partial(Figure, numbers, draw_panels, [(source(one), rows)])
    return files
