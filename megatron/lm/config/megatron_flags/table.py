"""The whole table, how to look a flag up in it, and the flag that a misspelt one was meant to be.

A misspelt flag is one with a slip or two of the fingers: `--trian-iters` is `--train-iters` with two letters exchanged. `--mock-data` is no
misspelling of `--override-data`, though half of their letters agree.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from megatron.lm.config.megatron_flags import data, model, outputs, parallel, precision, training
from megatron.lm.config.megatron_flags.row import Row

TABLE: Mapping[str, tuple[Row, ...]] = MappingProxyType(
    {
        "model": model.FLAGS,
        "training": training.FLAGS,
        "parallelism": parallel.FLAGS,
        "precision": precision.FLAGS,
        "data": data.FLAGS,
        "logs and checkpoints": outputs.FLAGS,
    }
)
LONG = 12  # characters from which on a second slip is forgiven


@functools.cache
def _by_flag() -> Mapping[str, tuple[Row, ...]]:
    """Flag -> its lines, those about one value first."""
    found: dict[str, list[Row]] = {}
    for row in (row for rows in TABLE.values() for row in rows):
        found.setdefault(row.flag, []).append(row)
    return {flag: tuple(sorted(rows, key=lambda row: row.value is None)) for flag, rows in found.items()}


def lines_about(flag: str) -> tuple[Row, ...]:
    """The lines of a flag (with hyphens), those about one value first, then those of the families that it belongs to; none where it is
    unknown."""
    rows = _by_flag()
    families = sorted((name for name in rows if name.endswith("*") and flag.startswith(name[:-1])), key=len, reverse=True)
    return tuple(row for name in (flag, *families) for row in rows.get(name, ()))


def find(flag: str, values: Sequence[str]) -> Row | None:
    """The line about a flag (with hyphens) with these values; None where there is none."""
    return next((row for row in lines_about(flag) if row.serves(values)), None)


def names() -> frozenset[str]:
    """All flags of the table, without families."""
    return frozenset(flag for flag in _by_flag() if not flag.endswith("*"))


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known spelling within one slip of `word`, within two of a long one; None where none is so close. A slip is a letter that is
    left out, added, replaced, or exchanged with the next."""
    most = 2 if len(word) >= LONG else 1
    slips = {name: distance for name in known if (distance := distance_of(word, name, most)) <= most}
    return min(slips, key=lambda name: (slips[name], name)) if slips else None


def distance_of(one: str, other: str, most: int) -> int:
    """Slips between two words (the optimal string alignment distance), or `most` + 1 where there are more."""
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
