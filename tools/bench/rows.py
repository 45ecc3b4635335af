"""One CSV row per measurement: every speed or memory number of the project is in `tools/bench/results/`, with its machine."""

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


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> str:
    """Return the short hash of the measured tree, with `+` if it has uncommitted changes outside of `WRITTEN`; `unknown` outside git."""
    git = ("git", "-C", str(ROOT))
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{path}" for path in WRITTEN))
    head = _output(*git, "rev-parse", "--short", "HEAD")
    return "unknown" if head is None or changed is None else head + ("+" if changed else "")


def machine(tree: str | None = None) -> dict[str, str]:
    """Return the columns for machine and date; `tree` is the commit if git is not available."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": tree or commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "driver": (_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").split("\n")[0].strip(),
        "torch": torch.__version__,
    }


def add_flags(parser: argparse.ArgumentParser, file: str | None, **csv: Any) -> None:
    """Add --csv, by default `file` among the results or none, and --commit; `csv` is passed on to argparse."""
    default = None if file is None else ROOT / "tools/bench/results" / file
    parser.add_argument("--csv", type=output_file, default=default, **({"help": "(default: %(default)s)"} | csv))
    parser.add_argument("--commit", help="hash to record if this tree is not a git checkout")


def percentile_columns(name: str, values: Sequence[float], scale: float = 1, digits: int | None = None) -> dict[str, float]:
    """Return the columns NAME_p20, NAME and NAME_p80: 20th, 50th and 80th percentile of at least two values, times `scale`, rounded."""
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    columns = {f"{name}_p20": cuts[1], name: statistics.median(values), f"{name}_p80": cuts[7]}
    return {column: round(value * scale, digits) for column, value in columns.items()}


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
