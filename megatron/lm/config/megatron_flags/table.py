"""The whole table, lookup of a flag, and suggestions for misspelled flags.

A misspelled flag has one or two typing errors: `--trian-iters` is `--train-iters` with two letters swapped. `--mock-data` is not a
misspelling of `--override-data`, although they share half of their letters.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from megatron.lm.config.megatron_flags.topics import data, experts, model, outputs, parallel, precision, training
from megatron.lm.config.megatron_flags.topics.row import Row

TABLE: Mapping[str, tuple[Row, ...]] = MappingProxyType(
    {
        "model": model.FLAGS,
        "mixture of experts": experts.FLAGS,
        "training": training.FLAGS,
        "parallelism": parallel.FLAGS,
        "precision": precision.FLAGS,
        "data": data.FLAGS,
        "logs and checkpoints": outputs.FLAGS,
    }
)
LONG = 12  # a second typing error is allowed from this length on


@functools.cache
def _by_flag() -> Mapping[str, tuple[Row, ...]]:
    """Return the lines of each flag, those for one value first."""
    by_flag: dict[str, list[Row]] = {}
    for row in (row for rows in TABLE.values() for row in rows):
        by_flag.setdefault(row.flag, []).append(row)
    return {flag: tuple(sorted(rows, key=lambda row: row.value is None)) for flag, rows in by_flag.items()}


@functools.cache
def lines_about(flag: str) -> tuple[Row, ...]:
    """Return the lines of a flag (with hyphens): first the lines for one value, then the lines of its families; empty if it is unknown."""
    rows = _by_flag()
    families = sorted((name for name in rows if name.endswith("*") and flag.startswith(name[:-1])), key=len, reverse=True)
    return tuple(row for name in (flag, *families) for row in rows.get(name, ()))


def find(flag: str, values: Sequence[str]) -> Row | None:
    """Return the line for a flag (with hyphens) with these values; None if there is none."""
    return next((row for row in lines_about(flag) if row.serves(values)), None)


def names() -> frozenset[str]:
    """Return all flags of the table, without families."""
    return frozenset(flag for flag in _by_flag() if not flag.endswith("*"))


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word within one typing error of `word`, or two for a long word; None if there is none. A typing error is a letter
    that is missing, added, replaced, or swapped with the next."""
    most = 2 if len(word) >= LONG else 1
    slips = {name: distance for name in known if (distance := distance_of(word, name, most)) <= most}
    return min(slips, key=lambda name: (slips[name], name)) if slips else None


def distance_of(one: str, other: str, most: int) -> int:
    """Return the optimal string alignment distance between two words, or `most` + 1 if it is larger."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last = row, before
        row = [i]
        for j, there in enumerate(other, 1):
            slips = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != there))
            if i > 1 and j > 1 and (letter, one[i - 2]) == (other[j - 2], there):
                slips = min(slips, last[j - 2] + 1)
            row.append(slips)
        if min(row) > most:
            return most + 1
    return row[-1]
