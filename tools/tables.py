"""Generate the tables and figures of the README and the documentation from the measured results.

    make tables              # write them: every `<!-- table: NAME -->` ... `<!-- end -->`, every docs/results/figures/NAME.png
    make tables ARGS=--check # write nothing; exit with 1 if a published table or figure differs from the results

A page names a table in its marker. `tools/docs/tables.py` lists the tables; `planner.py`, `post.py`, `rounding.py` and others in the same
folder list those of their subject. `tools/reproduce/pages.py` generates the pages of `python -m tools.reproduce`, `precisions.py` those
of the precisions, `promises.py` the page of promises, and `megatron/lm/config/megatron_flags/listing.py` that of Megatron-LM's flags. The
numbers of each figure and the version of its drawing are stored next to it, and a check compares these, not the image. A row whose commit
is not in the history is refused, unless it is marked (`+` or `?` after its commit); then it is published with a mark. A shallow clone
prints the commits that could not be checked.
"""

import functools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.lm.config.megatron_flags import listing
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser
from tools.docs import (
    experts,
    grids,
    long_sequences,
    outliers,
    planner,
    post,
    precisions,
    promises,
    published,
    records,
    rounding,
    widths,
)
from tools.docs import figures as drawn
from tools.docs import tables as listed
from tools.docs.drawing import DRAWING
from tools.docs.evidence import COMPUTED, ROOT, History, unproven
from tools.docs.figures import Figure
from tools.reproduce import pages as reproduction

TABLES = (
    listed.TABLES
    | experts.TABLES
    | grids.TABLES
    | long_sequences.TABLES
    | outliers.TABLES
    | planner.TABLES
    | post.TABLES
    | published.TABLES
    | records.TABLES
    | rounding.TABLES
    | widths.TABLES
    | {"reproduction": reproduction.overview}
)
FIGURES = drawn.FIGURES | planner.FIGURES | precisions.FIGURES
MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
FIGURE_FOLDER = "docs/results/figures"


def pages(root: Path) -> list[Path]:
    """Return the pages that may contain tables."""
    return [root / "README.md", *sorted(path for path in (root / "docs").rglob("*.md") if "_build" not in path.parts)]


def filled(text: str, page: str) -> str:
    """Return a page with each marked table filled from the current results.

    Raises:
        ValueError: a table does not exist, or a marker has no end.
    """

    def table(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"{page} names the unknown table {match[2]!r}: the tables are {', '.join(sorted(TABLES))}")
        return f"{match[1]}\n{TABLES[match[2]]().markdown()}\n\n{match[4]}"

    if text.count("<!-- table: ") != len(MARKED.findall(text)):
        raise ValueError(f"{page} has a marker <!-- table: NAME --> without <!-- end -->: close it")
    return MARKED.sub(table, text)


@functools.cache
def figures() -> Mapping[str, Callable[[], Figure]]:
    """Return the functions that make the figures, by name."""
    return FIGURES | reproduction.figures()


def generated(root: Path) -> dict[Path, str]:
    """Return the wholly generated pages that are stale, by path; "" for the page of an entry that no longer exists."""
    current = {root / path: text for path, text in reproduction.pages().items()}
    current |= {root / path: text for path, text in precisions.pages().items()}
    current |= {root / promises.PAGE: promises.page(ROOT), root / listing.PAGE: listing.page()}
    gone = {path: "" for path in (root / reproduction.PAGES).glob("*.md") if path not in current and path.stem != "reproduction"}
    there = {path: path.read_text(encoding="utf-8") if path.is_file() else "" for path in current}
    return {path: text for path, text in current.items() if text != there[path]} | gone


def prove(history: History) -> list[str]:
    """Check the commits of the results behind all tables and figures; return those that this clone cannot check.

    Raises:
        ValueError: as `unproven`.
    """
    every = [*(make().sources for make in TABLES.values()), *(make().sources for make in figures().values())]
    proven = ((name, [row for row in rows if name not in COMPUTED or "commit" in row]) for sources in every for name, rows in sources)
    missing = {line for name, rows in proven for line in unproven(rows, name, history)}
    return sorted(missing)


def stale_figures(root: Path) -> list[str]:
    """Return the figures that do not exist, or were drawn from other numbers than the current results or by another `drawing`."""
    stale = []
    for name, make in figures().items():
        picture, numbers = root / FIGURE_FOLDER / f"{name}.png", root / FIGURE_FOLDER / f"{name}.json"
        kept = json.loads(numbers.read_text(encoding="utf-8")) if picture.is_file() and numbers.is_file() else None
        if kept != stored(make()):
            stale.append(name)
    return stale


def stored(figure: Figure) -> dict[str, Any]:
    """Return the sidecar of a figure: its numbers, and the version of what drew it."""
    return {"drawing": DRAWING} | figure.numbers


def draw(name: str, root: Path) -> None:
    """Draw a figure and store its numbers next to it."""
    folder = root / FIGURE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    figure = figures()[name]()
    figure.draw(figure.numbers, folder / f"{name}.png")
    (folder / f"{name}.json").write_text(json.dumps(stored(figure), indent=1) + "\n", encoding="utf-8")


@exit_codes.command
def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; return 0, 1 if --check finds something stale, 2 if results may not be published."""
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing: print what is stale")
    options = parser.parse_args(arguments)
    missing = prove(History.of(ROOT))
    if missing:
        print(f"this clone lacks part of the history: {len(missing)} commits of results could not be checked ({'; '.join(missing)})")
    stale_pages = {path: new for path in pages(root) if (new := filled(old := path.read_text(encoding="utf-8"), path.name)) != old}
    stale_pages |= generated(root)
    undrawn = stale_figures(root)
    stale = [*(path.relative_to(root).as_posix() for path in stale_pages), *(f"{FIGURE_FOLDER}/{name}.png" for name in undrawn)]
    if options.check:
        print(f"stale: {', '.join(stale)}; run make tables" if stale else "every table and figure matches the results")
        return 1 if stale else 0
    for path, new in stale_pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new, encoding="utf-8") if new else path.unlink()
    for name in undrawn:
        draw(name, root)
    print(f"written: {', '.join(stale)}" if stale else "every table and figure already matched the results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
