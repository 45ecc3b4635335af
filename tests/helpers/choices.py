"""Cases by default and by night: of a product of choices, the default run takes each choice once."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from msamp.numerics.formats import Format


def _shown(value: Any) -> str:
    """Return a value's part of a case's name: the same in every process, so without addresses."""
    named = getattr(value, "name", None) or getattr(value, "__name__", None)
    return str(named or re.sub(r" at 0x[0-9a-f]+", "", str(value)))


def each_once(seconds: float = 0.3, **choices: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise by as many cases as the longest choice has values, in which each value of each stands. Where two `choices` are of dtypes
    or formats, each two of their values meet in a further case, which is nightly, of `seconds`."""
    sizes = [len(values) for values in choices.values()]
    diagonal = [tuple(i % size for size in sizes) for i in range(max(sizes))]
    kinds = [any(isinstance(x, torch.dtype | Format) for x in values) for values in choices.values()]
    cases = [
        pytest.param(
            *(values[i] for values, i in zip(choices.values(), place, strict=True)),
            marks=[] if place in diagonal else pytest.mark.nightly(seconds),
        )
        for place in covering(sizes, diagonal, [number for number, is_kind in enumerate(kinds) if is_kind])
    ]
    return pytest.mark.parametrize(tuple(choices), cases, ids=_shown)


def each_value(**choices: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise by as many cases as the longest choice has values: each value of each stands in one of them. A choice that starts again
    is shifted, so that it meets other values of the choices before it. A `pytest.param` of one value gives its marks to the case."""
    columns = [[x if hasattr(x, "marks") else pytest.param(x) for x in values] for values in choices.values()]
    cases = [
        [values[(i + place * (i // len(values))) % len(values)] for place, values in enumerate(columns)]
        for i in range(max(map(len, columns)))
    ]
    params = [pytest.param(*(x.values[0] for x in case), marks=[mark for x in case for mark in x.marks]) for case in cases]
    return pytest.mark.parametrize(tuple(choices), params, ids=_shown)


def every_pair(test: Callable[..., None]) -> Callable[..., None]:
    """Replace the product of the `parametrize` marks below it by fewer cases, in which each two values of two marks still meet."""
    return _fewer(test, covering)


def every_value(test: Callable[..., None]) -> Callable[..., None]:
    """Replace the product of the `parametrize` marks below it by as many cases as the longest has values, with each value of each."""
    return _fewer(test, lambda sizes: [tuple((i + k * (i // n)) % n for k, n in enumerate(sizes)) for i in range(max(sizes))])


def _fewer(test: Callable[..., None], rows: Callable[[Sequence[int]], Sequence[tuple[int, ...]]]) -> Callable[..., None]:
    marks: list[Any] = test.pytestmark  # type: ignore[attr-defined]
    columns = [_params(mark) for mark in marks if mark.name == "parametrize"]
    names = [name for mark in marks if mark.name == "parametrize" for name in _names(mark)]
    test.pytestmark = [mark for mark in marks if mark.name != "parametrize"]  # type: ignore[attr-defined]
    cases = []
    for row in rows([len(column) for column in columns]):
        chosen = [column[i] for column, i in zip(columns, row, strict=True)]
        values, ids = [x for param in chosen for x in param.values], "-".join(param.id for param in chosen)
        cases.append(pytest.param(*values, marks=[mark for param in chosen for mark in param.marks], id=ids))
    return pytest.mark.parametrize(names, cases)(test)


def _names(mark: Any) -> list[str]:
    """Return the arguments that a `parametrize` mark sets."""
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _params(mark: Any) -> list[Any]:
    """Return the values of a `parametrize` mark as params with ids."""
    several, ids = len(_names(mark)) > 1, mark.kwargs.get("ids")
    params = []
    for i, x in enumerate(mark.args[1]):
        values = x.values if hasattr(x, "marks") else tuple(x) if several else (x,)
        shown = [ids(v) if callable(ids) else _shown(v) for v in values] if ids is None or callable(ids) else [ids[i]]
        params.append(pytest.param(*values, marks=getattr(x, "marks", ()), id="-".join(map(str, shown))))
    return params


def covering(sizes: Sequence[int], rows: Sequence[tuple[int, ...]] = (), paired: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Return rows of one place per column, the given `rows` first, so that each two places of two `paired` columns (None: of any two) are
    together in a row."""
    covered, columns = list(rows), range(len(sizes))
    if len(sizes) == 1:
        return [(i,) for i in range(sizes[0])]
    chosen = columns if paired is None else paired
    pairs = [((a, i), (b, j)) for a, b in itertools.combinations(chosen, 2) for i in range(sizes[a]) for j in range(sizes[b])]
    missing = dict.fromkeys(pairs)
    for place in rows:
        for pair in itertools.combinations(enumerate(place), 2):
            missing.pop(pair, None)
    while missing:
        row = dict(next(iter(missing)))
        for column in columns:
            if column not in row:
                met = [sum(tuple(sorted(((column, i), pair))) in missing for pair in row.items()) for i in range(sizes[column])]
                row[column] = max(range(sizes[column]), key=met.__getitem__)
        covered.append(tuple(row[column] for column in columns))
        for pair in itertools.combinations(enumerate(covered[-1]), 2):
            missing.pop(pair, None)
    return covered
