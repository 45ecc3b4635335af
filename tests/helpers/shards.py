"""How the nightly tests are divided: whole files, for what the tests of a file share, into parts of about equal time."""

from collections.abc import Mapping, Sequence

import pytest


def part(text: str) -> tuple[int, int]:
    """(i, n) of "i/n"; pytest.UsageError where i is not in 1 .. n."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--shard {text}: give i/n with i from 1 to n, such as 1/4")
    return int(number), int(count)


def file_of(item: pytest.Item) -> str:
    """The file of a test."""
    return item.nodeid.partition("::")[0]


def seconds(item: pytest.Item) -> float:
    """About how long a test takes: what its marker `nightly` says, or 2."""
    marker = item.get_closest_marker("nightly")
    return float(marker.args[0]) if marker and marker.args else 2.0


def divided(weights: Mapping[str, float], count: int) -> list[set[str]]:
    """The files of each of `count` parts: the longest first, each to the part that has least."""
    loads, parts = [0.0] * count, [set[str]() for _ in range(count)]
    for file, weight in sorted(weights.items(), key=lambda pair: (-pair[1], pair[0])):
        least = loads.index(min(loads))
        loads[least] += weight
        parts[least].add(file)
    return parts


def outside(items: Sequence[pytest.Item], number: int, count: int) -> set[str]:
    """The files of `items` that other parts have."""
    weights: dict[str, float] = {}
    for item in items:
        weights[file_of(item)] = weights.get(file_of(item), 0.0) + seconds(item)
    return weights.keys() - divided(weights, count)[number - 1]
