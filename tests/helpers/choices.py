"""Cases by default and by night: of a product of choices, the default run takes each choice once."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def each_once(seconds: float = 0.3, **choices: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise by the product of `choices`. The default run has as many cases as the longest has values, in which each value of each
    stands; the others are nightly, of `seconds` each."""
    diagonal = {tuple(i % len(values) for values in choices.values()) for i in range(max(map(len, choices.values())))}
    places = itertools.product(*(range(len(values)) for values in choices.values()))
    cases = [
        pytest.param(
            *(values[i] for values, i in zip(choices.values(), place, strict=True)),
            marks=[] if place in diagonal else pytest.mark.nightly(seconds),
        )
        for place in places
    ]
    return pytest.mark.parametrize(tuple(choices), cases, ids=lambda value: getattr(value, "name", str(value)))


def each_value(**choices: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise by as many cases as the longest choice has values: each value of each stands in one of them. A choice that starts again
    is shifted, so that it meets other values of the choices before it. A `pytest.param` of one value gives its marks to the case."""
    columns = [[x if hasattr(x, "marks") else pytest.param(x) for x in values] for values in choices.values()]
    cases = [
        [values[(i + place * (i // len(values))) % len(values)] for place, values in enumerate(columns)]
        for i in range(max(map(len, columns)))
    ]
    params = [pytest.param(*(x.values[0] for x in case), marks=[mark for x in case for mark in x.marks]) for case in cases]
    return pytest.mark.parametrize(tuple(choices), params, ids=lambda value: getattr(value, "name", str(value)))
