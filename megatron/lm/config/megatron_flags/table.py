"""The whole table, and how to look a flag up in it."""

import functools
from collections.abc import Mapping, Sequence
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
