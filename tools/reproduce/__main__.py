"""Reproduce the tables and figures of FP8-LM, Collage, COAT and the slides on mixed precision.

    python -m tools.reproduce --list                       all entries, what each needs, its results, their age and intervals
    python -m tools.reproduce fp8lm-table9                 one entry, at the largest size that fits this machine
    python -m tools.reproduce collage-table6 --size toy    in seconds on a CPU
    python -m tools.reproduce --recompute                  results that follow from shapes and recorded results, where these have changed

    python -m tools.reproduce fp8lm-table6 --size full --pieces '#4 seed 1234' '#2a seed 1234' --at-once 2

The results of each piece are written to tools/reproduce/results/entries/NAME.csv at once, so that an interrupted call resumes; --again
discards the results of the size. `make tables` generates the page of the documentation from them and from tools/reproduce/entries/*.toml.
"""

import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, path
from tools.bench.rows import ROOT
from tools.reproduce import keep, texts
from tools.reproduce.entry import ENTRIES, Entry


def status(one: Entry, rows: Sequence[keep.Row]) -> str:
    """Return which sizes of an entry have results among its rows."""
    sizes = []
    for size in one.sizes:
        left, whole = len(keep.missing(one, size, rows)), len(one.pieces_of(size))
        if left < whole:
            sizes.append(f"{size} done" if not left else f"{size}: {whole - left} of {whole} pieces")
    return ", ".join(sizes) or "no result yet"


def age(rows: Sequence[keep.Row], today: date) -> str:
    """Return when and at which commits rows were measured, and how many days ago the oldest was."""
    first, last = (choose(row["date"] for row in rows) for choose in (min, max))
    days = (today - date.fromisoformat(first)).days
    commits = sorted({row["commit"] for row in rows})
    named = ", ".join(commits[:3]) + (f" and {len(commits) - 3} more" if len(commits) > 3 else "")
    lost = ", not all of them in the history" if any(commit.endswith("?") for commit in commits) else ""
    return f"measured {first if first == last else f'{first} to {last}'} ({days} days ago), commit {named}{lost}"


def listing(folder: Path, today: date) -> list[str]:
    """Return the lines of --list: sizes, results so far, and of the largest size with results its age and the intervals of its losses."""
    lines = []
    for one in ENTRIES.values():
        sizes = "; ".join(f"{size} ({needs})" for size, needs in one.sizes.items()) or "-"
        results = keep.read(folder / f"{one.name}.csv")
        lines += [f"{one.name}: {one.title}", f"    sizes: {sizes}", f"    {status(one, results)}"]
        size, rows = keep.largest(one, results)
        if size:
            lines.append(f"    {size}: {age(rows, today)}")
            lines += [f"    {sentence}" for sentence in keep.loss_sentences(one, rows)]
    return lines


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 for bad input."""
    parser = Parser(description=__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="an entry of --list")
    parser.add_argument("--list", action="store_true", help="list every table and figure")
    parser.add_argument("--recompute", action="store_true", help="replace results that are computed, not measured, and have changed")
    parser.add_argument("--size", default="auto", help="auto, or a size of the entry (default: the largest that fits this machine)")
    parser.add_argument("--text", type=path, help=f"text for small trainings (default: {texts.SPEECHES}; toy sizes: this documentation)")
    parser.add_argument("--out", type=path, default=ROOT / keep.RESULTS, help="folder of the CSV files")
    parser.add_argument("--again", action="store_true", help="discard the results of this size and the cached files, and rerun it")
    parser.add_argument("--pieces", nargs="+", default=[], metavar="PIECE", help="run only these pieces of the size")
    parser.add_argument("--at-once", type=count(1), default=1, help="trainings that run at the same time (default: %(default)s)")
    parser.add_argument("--commit", help="commit hash to record if this tree is not a git checkout")
    options = parser.parse_args(arguments)
    if options.list + options.recompute + (options.name is not None) != 1:
        parser.error("give the NAME of an entry, or --list to see them, or --recompute")
    if options.list:
        print(*listing(options.out, date.today()), sep="\n")
        return 0
    if options.recompute:
        for one in ENTRIES.values():
            for change in keep.recompute(one, options.out, options.commit):
                print(f"{one.name}, {change}: replaced")
        return 0
    if options.name not in ENTRIES:
        raise ValueError(f"{options.name!r} is not an entry: choose one of {', '.join(ENTRIES)}")
    one = ENTRIES[options.name]
    size = one.largest() if options.size == "auto" else options.size
    if size not in one.sizes:
        raise ValueError(f"--size {size}: {one.name} has {', '.join(one.sizes)}")
    lacking = one.sizes[size].lacking()
    if lacking:
        raise ValueError(f"--size {size} of {one.name} needs {lacking}")
    text = texts.chosen(options.text, one.sizes[size])
    for piece, rows in keep.run(one, size, text, options.out, options.commit, options.again, options.pieces, options.at_once):
        print(f"{one.title}, {size}, {piece}: {rows[0]['seconds']} s")
        for row in rows:
            if not row["x"]:
                print(f"  {row['quantity']}: {row['ours']} {row['unit']}" + (f" (paper: {row['paper']})" if row["paper"] else ""))
    left = keep.missing(one, size, keep.read(options.out / f"{one.name}.csv"))
    print(f"{options.out / one.name}.csv has {'all' if not left else 'not all'} pieces of size {size}; make tables makes its page")
    return 0


if __name__ == "__main__":
    sys.exit(main())
