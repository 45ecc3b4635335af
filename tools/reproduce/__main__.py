"""Every table and figure of FP8-LM, Collage, COAT and the slides on mixed precision, again.

    python -m tools.reproduce --list                       what there is, what it needs, and where it stands
    python -m tools.reproduce fp8lm-table9                 one, at the largest size that this machine can take
    python -m tools.reproduce collage-table6 --size toy    in seconds on a CPU

    python -m tools.reproduce fp8lm-table6 --size full --pieces '#4 seed 1234' '#2a seed 1234' --at-once 2

Each piece that was run is in tools/reproduce/results/entries/NAME.csv at once, so that a call that was cut off goes on; --again forgets the
rows of the size. `make tables` makes the page of the documentation from the rows, with the words of tools/reproduce/verdicts.toml.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, path
from tools.bench.rows import ROOT
from tools.reproduce import keep, texts
from tools.reproduce.entry import Entry
from tools.reproduce.registry import ENTRIES


def status(one: Entry, folder: Path) -> str:
    """Where an entry stands: results by size, or why there are none."""
    found = keep.read(folder / f"{one.name}.csv")
    told = []
    for size in one.sizes:
        left, whole = len(keep.missing(one, size, found)), len(one.pieces(size))
        if left < whole:
            told.append(f"{size} done" if not left else f"{size}: {whole - left} of {whole} pieces")
    return ", ".join(told) or "no result yet"


def listing(folder: Path) -> list[str]:
    """The lines of --list."""
    lines = []
    for one in ENTRIES.values():
        sizes = "; ".join(f"{size} ({needs})" for size, needs in one.sizes.items()) or "-"
        lines += [f"{one.name}: {one.title}", f"    sizes: {sizes}", f"    {status(one, folder)}"]
    return lines


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0, or 2 for bad input."""
    parser = Parser(description=__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="an entry of --list")
    parser.add_argument("--list", action="store_true", help="name every table and figure")
    parser.add_argument("--size", default="auto", help="auto, or a size of the entry (default: the largest that this machine can take)")
    parser.add_argument("--text", type=path, help=f"what small trainings read (default: {texts.SPEECHES}; toy sizes: these pages)")
    parser.add_argument("--out", type=path, default=ROOT / keep.RESULTS, help="folder of the CSV files")
    parser.add_argument("--again", action="store_true", help="forget the rows of this size and the kept files, and run it anew")
    parser.add_argument("--pieces", nargs="+", default=[], metavar="PIECE", help="run these pieces of the size alone")
    parser.add_argument("--at-once", type=count(1), default=1, help="trainings beside each other (default: %(default)s)")
    parser.add_argument("--commit", help="hash to record where this tree is not a git checkout")
    options = parser.parse_args(arguments)
    if options.list == (options.name is not None):
        parser.error("give the NAME of an entry, or --list, which names them")
    if options.list:
        print(*listing(options.out), sep="\n")
        return 0
    if options.name not in ENTRIES:
        raise ValueError(f"{options.name!r} is no entry: choose one of {', '.join(ENTRIES)}")
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
