"""Reproduce the tables and figures of FP8-LM, Collage, COAT and the slides on mixed precision.

    python -m tools.reproduce --list                       all entries, what each needs, its results, their age and intervals
    python -m tools.reproduce fp8lm-table9                 one entry, at the largest size that fits this machine
    python -m tools.reproduce collage-table6 --size toy    in seconds on a CPU
    python -m tools.reproduce fp8lm-table2 --size kept     a size with results: prints them next to the paper's, and runs nothing
    python -m tools.reproduce fp8lm-table2 --size kept --out FOLDER     runs it all the same, and writes there
    python -m tools.reproduce --recompute                  results that follow from shapes and recorded results, where these have changed

    python -m tools.reproduce fp8lm-table6 --size full --pieces '#4 seed 1234' '#2a seed 1234' --at-once 2

The results of each piece are written to tools/reproduce/results/entries/NAME.csv at once, so that an interrupted call resumes; --again
discards the results of the size and measures them again. `make tables` generates the page of the documentation from them and from
tools/reproduce/entries/*.toml.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, path
from tools.bench.rows import ROOT
from tools.docs.tables import wrapped
from tools.reproduce import keep, pages, texts
from tools.reproduce.entry import ENTRIES, Entry


def listing(folder: Path) -> list[str]:
    """Return the lines of --list: sizes, results so far, and where and when they were measured, with the intervals of losses."""
    lines = []
    for one in ENTRIES.values():
        sizes = "; ".join(f"{size} ({needs})" for size, needs in one.sizes.items()) or "-"
        results = keep.read(folder / f"{one.name}.csv")
        left = {size: len(keep.missing(one, size, results)) for size in one.sizes}
        states = [f"{size}: {len(one.pieces_of(size)) - left[size]} of {len(one.pieces_of(size))} pieces" for size in one.sizes]
        lines += [f"{one.name}: {one.title}", f"    sizes: {sizes}", f"    results: {', '.join(states)}"]
        size, rows = keep.largest(one, results)
        if size:
            lines.append(f"    {size}: {keep.verdict(one, rows)}; {', '.join(pages.measured(rows))}")
            lines += [f"    {sentence}" for sentence in keep.loss_sentences(one, rows)]
    return lines


def compared(one: Entry, size: str, file: Path) -> list[str]:
    """Return the claim, the results of a size next to the paper's, what is missing, and how to measure it again."""
    rows = [row for row in keep.read(file) if row["size"] == size]
    verdict = [f"Verdict: {one.verdict}.", ""] if one.judged == size else []
    missing = ", ".join(keep.missing(one, size, rows))
    again = f"{f'Missing: {missing}. ' if missing else ''}To measure it again: `python -m tools.reproduce {one.name} --size {size}`, with "
    again += f"`--out FOLDER` to write there, with `--again` to replace these results. It requires: {one.sizes[size]}."
    comparison = pages.table(one, rows)._replace(files=[str(file)]).markdown()
    return [one.title, "", wrapped(f"The claim: {one.claim}"), "", *verdict, comparison, "", wrapped(again)]


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 for bad input."""
    parser = Parser(prog="python -m tools.reproduce", description=__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="an entry of --list")
    parser.add_argument("--list", action="store_true", help="list every table and figure")
    parser.add_argument("--recompute", action="store_true", help="replace results that are computed, not measured, and have changed")
    parser.add_argument("--size", default="auto", help="auto, or a size of the entry (default: the largest that fits this machine)")
    parser.add_argument("--text", type=path, help=f"text for small trainings (default: {texts.SPEECHES}; toy sizes: this documentation)")
    parser.add_argument(
        "--out", type=path, default=ROOT / keep.RESULTS, help="folder of the CSV files; sizes with results there are not run"
    )
    parser.add_argument("--again", action="store_true", help="discard the results of this size and the cached files, and rerun it")
    parser.add_argument("--pieces", nargs="+", default=[], metavar="PIECE", help="run only these pieces of the size")
    parser.add_argument("--at-once", type=count(1), default=1, help="trainings that run at the same time (default: %(default)s)")
    parser.add_argument("--commit", help="commit hash to record if this tree is not a git checkout")
    options = parser.parse_args(arguments)
    if options.list + options.recompute + (options.name is not None) != 1:
        parser.error("give the NAME of an entry, or --list to see them, or --recompute")
    if options.list:
        print(*listing(options.out), sep="\n")
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
    lacking, file = one.sizes[size].lacking(), options.out / f"{one.name}.csv"
    missing = keep.missing(one, size, keep.read(file))
    some = len(missing) < len(one.pieces_of(size))
    left = set(missing) & set(options.pieces or missing)
    if some and not options.again and (lacking or not left):
        print(*compared(one, size, file), sep="\n")
        return 0
    if lacking:
        raise ValueError(f"--size {size} of {one.name} needs {lacking}")
    text = texts.chosen(options.text, one.sizes[size])
    for piece, rows in keep.run(one, size, text, options.out, options.commit, options.again, options.pieces, options.at_once):
        print(f"{one.title}, {size}, {piece}: {rows[0]['seconds']} s")
    print(*compared(one, size, file), "`make tables` makes its page.", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
