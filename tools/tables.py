"""The tables and figures of README and documentation, made from the measured rows.

    make tables              # writes them: every `<!-- table: NAME -->` ... `<!-- end -->`, every docs/results/figures/NAME.png
    make tables ARGS=--check # writes nothing; 1 where what is published differs from the rows

A page names a table in its marker. `tools/docs/tables.py` lists the tables; `planner.py`, `post.py` and `rounding.py` in the same folder
list those of the planner, of what follows pre-training, and of stochastic rounding. `tools/docs/reproduction.py` generates the pages of
`python -m tools.reproduce`, `promises.py` the page of promises, and `megatron/lm/config/megatron_flags/listing.py` that of Megatron-LM's
flags. The numbers of each figure are stored next to it, and a check compares these, not the image. A row whose commit is not in the
history is refused, unless it is marked (`+` or `?` after its commit); then it is published with a mark. In a shallow clone the commits that
could not be checked are printed.
"""

import functools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron.lm.config.megatron_flags import listing
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser
from tools.docs import figures as drawn
from tools.docs import planner, post, promises, reproduction, rounding
from tools.docs import tables as listed
from tools.docs.evidence import COMPUTED, ROOT, History, unproven
from tools.docs.figures import Figure

TABLES = listed.TABLES | planner.TABLES | post.TABLES | rounding.TABLES | {"reproduction": reproduction.overview}
FIGURES = drawn.FIGURES | planner.FIGURES
MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
FIGURE_FOLDER = "docs/results/figures"


def pages(root: Path) -> list[Path]:
    """The pages that may hold tables."""
    return [root / "README.md", *sorted(path for path in (root / "docs").rglob("*.md") if "_build" not in path.parts)]


def filled(text: str, page: str) -> str:
    """A page with each marked table as the rows have it today.

    Raises:
        ValueError: a table that does not exist, or a marker without its end.
    """

    def table(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"{page} wants the table {match[2]!r}: the tables are {', '.join(sorted(TABLES))}")
        return f"{match[1]}\n{TABLES[match[2]]().markdown()}\n\n{match[4]}"

    if text.count("<!-- table: ") != len(MARKED.findall(text)):
        raise ValueError(f"{page} has a marker <!-- table: NAME --> without <!-- end -->: close it")
    return MARKED.sub(table, text)


@functools.cache
def figures() -> Mapping[str, Callable[[], Figure]]:
    """What makes each figure, by name."""
    return FIGURES | reproduction.figures()


def generated(root: Path) -> dict[Path, str]:
    """The pages that are made whole, and where they are stale; "" for one of an entry that is gone."""
    made = {root / path: text for path, text in reproduction.pages().items()}
    made |= {root / promises.PAGE: promises.page(ROOT), root / listing.PAGE: listing.page()}
    gone = {path: "" for path in (root / reproduction.PAGES).glob("*.md") if path not in made and path.stem != "reproduction"}
    there = {path: path.read_text(encoding="utf-8") if path.is_file() else "" for path in made}
    return {path: text for path, text in made.items() if text != there[path]} | gone


def prove(history: History) -> list[str]:
    """Of the rows behind all tables and figures, the commits that this clone cannot check.

    Raises:
        ValueError: as `unproven`.
    """
    made = [*(make().sources for make in TABLES.values()), *(make().sources for make in figures().values())]
    proven = ((name, [row for row in rows if name not in COMPUTED or "commit" in row]) for sources in made for name, rows in sources)
    missing = {line for name, rows in proven for line in unproven(rows, name, history)}
    return sorted(missing)


def stale_figures(root: Path) -> list[str]:
    """The figures that do not exist, or were drawn from other numbers than the rows give."""
    stale = []
    for name, make in figures().items():
        picture, numbers = root / FIGURE_FOLDER / f"{name}.png", root / FIGURE_FOLDER / f"{name}.json"
        kept = json.loads(numbers.read_text(encoding="utf-8")) if picture.is_file() and numbers.is_file() else None
        if kept != make().numbers:
            stale.append(name)
    return stale


def draw(name: str, root: Path) -> None:
    """Draw a figure and keep its numbers beside it."""
    folder = root / FIGURE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    figure = figures()[name]()
    figure.draw(figure.numbers, folder / f"{name}.png")
    (folder / f"{name}.json").write_text(json.dumps(figure.numbers, indent=1) + "\n", encoding="utf-8")


@exit_codes.command
def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Command line; 0, 1 where --check finds something stale, 2 for rows that may not be published."""
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing: say what is stale")
    options = parser.parse_args(arguments)
    missing = prove(History.of(ROOT))
    if missing:
        print(f"this clone has not the whole history: {len(missing)} commits of rows could not be checked ({'; '.join(missing)})")
    stale_pages = {path: new for path in pages(root) if (new := filled(old := path.read_text(encoding="utf-8"), path.name)) != old}
    stale_pages |= generated(root)
    undrawn = stale_figures(root)
    stale = [*(path.relative_to(root).as_posix() for path in stale_pages), *(f"{FIGURE_FOLDER}/{name}.png" for name in undrawn)]
    if options.check:
        print(f"stale: {', '.join(stale)}; make tables writes them anew" if stale else "every table and figure is what the rows say")
        return 1 if stale else 0
    for path, new in stale_pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new, encoding="utf-8") if new else path.unlink()
    for name in undrawn:
        draw(name, root)
    print(f"written: {', '.join(stale)}" if stale else "every table and figure was what the rows say")
    return 0


if __name__ == "__main__":
    sys.exit(main())
