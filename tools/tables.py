"""Generate the tables and figures of the README and the documentation from the measured results.

    make tables              # write them: every `<!-- table: NAME -->` ... `<!-- end -->`, every docs/results/figures/NAME.png
    make tables ARGS=--check # write nothing; exit with 1 if a published table or figure differs from the results

`tools/docs/tables.toml` has the tables, `tools/docs/tables.py` explains them. `tools/reproduce/pages.py` generates the pages of
`python -m tools.reproduce`, `tools/docs/promises.py` that of promises. A row whose commit is not in the history is refused, unless it is
marked (`+` or `?` after its commit); then it is published with a mark. A shallow clone prints the commits that could not be checked.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser
from tools.docs import as_published, drawing, promises, tables
from tools.docs.drawing import Numbers
from tools.docs.evidence import History, unproven
from tools.measurements import ROOT
from tools.reproduce import pages

FIGURE_FOLDER = "docs/results/figures"


def figures() -> dict[str, Numbers]:
    """Return the numbers of each figure, by name."""
    groups: dict[str, dict[str, float]] = {}
    for model, name, speed in tables.table("figure-own-loop").cells:
        groups.setdefault(model, {})[name] = float(speed)
    return {"own_loop": {"groups": groups, "x": "speed of a step, relative to torchao"}} | pages.figures()


def commits() -> Iterator[tuple[str, list[str]]]:
    """Yield the files of each published table and the commits of their rows; a table computed from shapes has none."""
    for name in tables.specifications():
        if name != "templates":
            table = tables.table(name)
            yield ", ".join(table.files), [place.commit for place in table.places]
    yield from pages.commits()


def stale(root: Path) -> dict[Path, str]:
    """Return the pages that differ from the results, by path, as they should be; "" for the page of an entry that no longer exists."""
    computed = {"reproduction": pages.overview(), "as-published": as_published.table()}
    current = {path: tables.filled(path.read_text(encoding="utf-8"), path.name, computed) for path in tables.pages(root)}
    current |= {root / path: text for path, text in pages.pages().items()} | {root / promises.PAGE: promises.page(ROOT)}
    of_entries = (root / pages.PAGES).glob("*.md")
    current |= {path: "" for path in of_entries if path.stem not in pages.ENTRIES and path.stem != "reproduction"}
    return {path: text for path, text in current.items() if not path.is_file() or text != path.read_text(encoding="utf-8")}


@exit_codes.command
def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; return 0, 1 if --check finds something stale, 2 if results may not be published."""
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing: print what is stale")
    options = parser.parse_args(arguments)
    history = History.of(ROOT)
    missing = sorted({line for name, some in commits() for line in unproven(some, name, history)})
    if missing:
        print(f"this clone lacks part of the history: {len(missing)} commits of results could not be checked ({'; '.join(missing)})")
    old_pages = stale(root)
    pictures = {root / FIGURE_FOLDER / f"{name}.png": numbers for name, numbers in figures().items()}
    undrawn = {path: numbers for path, numbers in pictures.items() if not drawing.is_current(numbers, path)}
    names = ", ".join(path.relative_to(root).as_posix() for path in (*old_pages, *undrawn))
    if options.check:
        print(f"stale: {names}; run make tables" if names else "every table and figure matches the results")
        return 1 if names else 0
    for path, text in old_pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8") if text else path.unlink()
    for path, numbers in undrawn.items():
        drawing.draw(numbers, path)
    print(f"written: {names}" if names else "every table and figure already matched the results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
