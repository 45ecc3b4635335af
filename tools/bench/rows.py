"""One CSV row per measurement: every speed or memory number of the project is in `tools/bench/results/`, with the machine it was measured
on."""

import argparse
import csv
import datetime
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.lm.shell.arguments import output_file
from tools.measurements import ROOT

# What a measurement writes, and pages made of it: `+` would mark every row after the first of a call.
WRITTEN = ("tools/bench/results", "tools/reproduce/results", "tools/bench/LOG.md", "docs", "README.md", "CHANGELOG.md")


def commit() -> str:
    """Return the short hash of the measured tree, with `+` if it has uncommitted changes outside of `WRITTEN`; `unknown` outside git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{path}" for path in WRITTEN))
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def driver() -> str:
    """Return the version of the NVIDIA driver; empty without one."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine(tree: str | None = None) -> dict[str, str]:
    """Return the columns for machine and date; `tree` is the commit if git is not available."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": tree or commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "driver": driver(),
        "torch": torch.__version__,
    }


def add_flags(parser: argparse.ArgumentParser, file: str | None, **csv: Any) -> None:
    """Add --csv, by default `file` among the results or none, and --commit; `csv` is passed on to argparse."""
    default = None if file is None else ROOT / "tools/bench/results" / file
    parser.add_argument("--csv", type=output_file, default=default, **({"help": "(default: %(default)s)"} | csv))
    parser.add_argument("--commit", help="hash to record if this tree is not a git checkout")


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20th, 50th and 80th percentile of at least two times."""
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return cuts[1], statistics.median(times), cuts[7]


def failure(error: Exception) -> str:
    """Return an error in a few words, for the row of a case that failed."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]


def aligned(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as text under a header, with right-aligned columns."""
    lines = [columns, *([str(row[name]) for name in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def write(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a CSV, replacing the file; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)


def check(path: Path, columns: Sequence[str]) -> None:
    """Raise a ValueError if the file exists with other columns."""
    if path.exists():
        with path.open(encoding="utf-8", newline="") as stream:
            header = next(csv.reader(stream), [])
        if header != columns:
            raise ValueError(f"{path} has columns {header}, the rows have {columns}; write to another file")


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a CSV, writing the header first if the file is new.

    Raises:
        ValueError: the file has other columns than the rows.
    """
    if not rows:
        return
    columns = list(rows[0])
    new = not path.exists()
    check(path, columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        if new:
            writer.writeheader()
        writer.writerows(rows)
