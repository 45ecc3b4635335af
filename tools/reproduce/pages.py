"""Generate the pages of `python -m tools.reproduce`, one per entry with results and an overview, from the entries and their results."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from megatron.lm.config.blend_file import number_of
from megatron.lm.evaluation.paired_difference import HOLDS
from tools.docs.drawing import Numbers
from tools.docs.tables import Measured, Table, wrapped
from tools.measurements import ROOT, Row
from tools.reproduce import keep
from tools.reproduce.entry import ENTRIES, NOT_MEASURED, NOT_RUN, Entry

PAGES = "docs/reproduction"
SHOWN = 10  # lines of a page's table; the others are in the CSV
MANY = 8  # curves in one panel, at most


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
                f"{one.name}: the verdict is {HOLDS!r}, but the 95 % interval of {undecided[0]!r} is not within the margin around its "
                "baseline: write 'not shown', or 'holds in part' and what holds"
            )
    return size, rows, keep.missing(one, size, results) if size else []


def difference(row: Row) -> str:
    """Return how ours differs from the paper's: percent for numbers, `same` or `differs` for words; empty if the paper or the run gives no
    value."""
    if not row["paper"] or row["ours"] == NOT_MEASURED:
        return ""
    ours, paper = number_of(row["ours"]), number_of(row["paper"])
    if ours is None or paper is None:
        return "same" if row["ours"] == row["paper"] else "differs in kind" if ours is not None else "differs"
    return f"{ours - paper:+.3g}" if not paper or row["unit"] == "%" else f"{100 * (ours / paper - 1):+.1f} %"


def _short(text: str) -> str:
    return f"{float(text):.4g}" if number_of(text) is not None else text


def that_matter(one: Entry, rows: Sequence[Row]) -> list[Row]:
    """Return the lines of a page's table, in their order: the headline, then those with a number of the paper, one seed of each first."""
    lines = [row for row in rows if not row["x"]]
    seen: dict[str, int] = {}
    order = []
    for number, row in enumerate(lines):
        seen[row["quantity"]] = seen.get(row["quantity"], -1) + 1
        order.append((row["quantity"] != one.headline, seen[row["quantity"]], not row["paper"], number))
    return [lines[number] for *_, number in sorted(sorted(order)[:SHOWN], key=lambda key: key[-1])]


def table(one: Entry, rows: Sequence[Row]) -> Table:
    """Return a table of ours, the paper's and the difference, a line per quantity."""
    lines, every = that_matter(one, rows), sum(not row["x"] for row in rows)
    cells = [[row["quantity"], _short(row["ours"]), _short(row["paper"]), difference(row), row["unit"], row["seed"]] for row in lines]
    note = f"The file has {every - len(lines)} more lines." if every > len(lines) else ""
    places = [Measured(row["commit"], row["gpu"], row["torch"], row["date"]) for row in lines]
    return Table(["quantity", "ours", "paper", "difference", "unit", "seed"], cells, [f"{keep.RESULTS}/{one.name}.csv"], places, note)


def measured(rows: Sequence[Row]) -> tuple[str, str]:
    """Return on which devices and on which days rows were measured."""
    cards = sorted({row["gpu"].replace("NVIDIA ", "").removesuffix(" 80GB HBM3") for row in rows}, key=lambda card: (card == "cpu", card))
    first, last = (choose(row["date"] for row in rows) for choose in (min, max))
    return " and ".join("CPU" if card == "cpu" else card for card in cards), first if first == last else f"{first} to {last}"


def page(one: Entry, root: Path = ROOT) -> str:
    """Return the page of an entry with rows; empty without rows."""
    size, rows, missing = published(one, root)
    if not size:
        return ""
    lines = [f"# {one.title}", "", wrapped(f"The claim: {one.claim}"), "", f"**{keep.verdict(one, rows)}**", "", wrapped(one.agree), ""]
    if one.same_loss:
        lines += ["Losses, paired by seed:", "", *(f"- {line}." for line in keep.loss_sentences(one, rows)), ""]
    for label, text in (("Likely cause", one.cause), ("How it was measured", one.setting), ("Limits", one.limits)):
        lines += [wrapped(f"{label}: {text}"), ""] if text else []
    seconds = sum({row["piece"]: float(row["seconds"]) for row in rows}.values())
    took = "computed from measurements of other tools" if size == "kept" else f"{seconds:.0f} s"
    lines += ["```sh", rows[0]["command"], "```", "", f"Size `{size}`, {took}: {', '.join(measured(rows))}.", ""]
    if missing:
        lines += [wrapped(f"Missing: {', '.join(f'`{piece}`' for piece in missing)}. The same command continues with them."), ""]
    if curves(rows):
        lines += [f"![{one.title}](../results/figures/{one.name}.png)", ""]
    return "\n".join([*lines, table(one, rows).markdown(), ""])


def pages(root: Path = ROOT) -> dict[str, str]:
    """Return the generated pages, by path from the root."""
    return {f"{PAGES}/{name}.md": text for name, one in ENTRIES.items() if (text := page(one, root))}


def overview() -> str:
    """Return the overview of all entries as Markdown: claim, the paper's number, ours, and the verdict."""
    cells = []
    for name, one in ENTRIES.items():
        size, rows, missing = published(one)
        heads = [row for row in rows if row["quantity"] == one.headline]
        ours, paper = (
            f"{_short(heads[0][key])} {heads[0]['unit']}".strip() if heads and heads[0][key] else "" for key in ("ours", "paper")
        )
        if len(heads) > 1:
            ours = f"{fmean(float(row['ours']) for row in heads):.4g} {heads[0]['unit']}".strip() + f", mean of {len(heads)}"
        verdict = keep.verdict(one, rows) + (f"; missing: {len(missing)}" if missing else "")
        what = one.headline if size else one.limits or "It has not been run yet."
        cells.append([f"[{one.title}]({name}.md)" if size else one.title, verdict, what, paper, ours, measured(rows)[0] if rows else ""])
    lines = [["table or figure", "verdict", "quantity, or why not", "paper", "ours", "device"], ["---"] * 6, *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def commits() -> Iterator[tuple[str, list[str]]]:
    """Yield the file of each entry and the commits of its published rows."""
    for one in ENTRIES.values():
        yield f"{keep.RESULTS}/{one.name}.csv", [row["commit"] for row in published(one)[1]]


# --------------------------------------------------------------------------------------------------------------------- figures


def curves(rows: Sequence[Row]) -> dict[str, list[list[float]]]:
    """Return the curves of an entry: name -> x and y; of several seeds x, mean, lowest and highest, where all have a value."""
    lines: dict[str, dict[str, dict[float, float]]] = {}
    for row in (row for row in rows if row["x"]):
        lines.setdefault(row["quantity"], {}).setdefault(row["seed"], {})[float(row["x"])] = float(row["ours"])
    drawn = {}
    for name, by_seed in lines.items():
        first, *others = by_seed.values()
        xs = [x for x in first if all(x in other for other in others)]
        values = [[seed[x] for seed in by_seed.values()] for x in xs]
        drawn[name] = [xs, *([ruled(each) for each in values] for ruled in ((fmean, min, max) if others else (fmean,)))]
    return drawn


def panels_of(drawn: Mapping[str, list[list[float]]]) -> dict[str, dict[str, list[list[float]]]]:
    """Split curves named `LABEL, WHAT` into panels: WHAT -> its curves by label.

    Up to `MANY` curves share a panel, under their whole names if they show different quantities. More have a panel per quantity; curves
    that would be alone in theirs are left to the table and the CSV.
    """
    panels: dict[str, dict[str, list[list[float]]]] = {}
    for name, curve in drawn.items():
        label, _, what = name.partition(", ")
        panels.setdefault(what, {})[label] = curve
    shared = {what: curves for what, curves in panels.items() if len(curves) > 1}
    return {"": dict(drawn)} if len(panels) > 1 and len(drawn) <= MANY else shared or panels


def figures() -> dict[str, Numbers]:
    """Return, for each entry with curves in its rows, the numbers of its figure."""
    numbers: dict[str, Numbers] = {}
    for name, one in ENTRIES.items():
        if drawn := {label: curve for label, curve in curves(published(one)[1]).items() if one.drawn in label}:
            numbers[name] = json.loads(json.dumps({"panels": panels_of(drawn)} | one.axes._asdict()))
    return numbers
