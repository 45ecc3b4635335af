"""Read recorded measurements: the rows of a CSV file, by its path in the repository."""

import csv
import functools
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Row = Mapping[str, str]


@functools.cache
def _read(path: Path) -> tuple[Row, ...]:
    with path.open(encoding="utf-8", newline="") as stream:
        return tuple(csv.DictReader(stream))


def read(name: str, root: Path = ROOT) -> tuple[Row, ...]:
    """Read the rows of a results file, by its path in the repository."""
    return _read(root / name)
