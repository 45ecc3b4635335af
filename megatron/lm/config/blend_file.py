"""Parse blends of datasets (`--data-path`, or a file with a weight and a prefix per line and `#` for comments; JSON with a blend for each
split) and `--split`.

Weights need not sum to 1 or 100: each dataset's share is its weight divided by their sum (`describe` returns it).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Datasets to draw from, with their weights (None: in proportion to their tokens)."""

    prefixes: list[str]
    weights: list[float] | None = None


def read_blend(path: str) -> tuple[str, ...]:
    """Read the words of a file, `--data-args-path`.

    Raises:
        ValueError: the file is unreadable, not UTF-8, or empty.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--data-args-path {path} cannot be read ({error}): give a text file with a weight and a prefix per line"
        ) from None
    words = tuple(word for line in text.splitlines() for word in line.partition("#")[0].split())
    if not words:
        raise ValueError(f"--data-args-path {path} names no dataset: write a weight and a prefix per line")
    return words


def read_blend_per_split(path: str) -> dict[str, tuple[str, ...]]:
    """Read the words of each split from a JSON file, `--per-split-data-args-path`.

    The file has the keys `train`, `valid` and `test`. Each value is what `--train-data-path` takes, as a list (weights may be numbers) or
    as one text with spaces. A split whose value is null or empty, or whose key is missing, has no data.

    Raises:
        ValueError: the file is unreadable or not such JSON, or names no training data.
    """
    name = f"--per-split-data-args-path {path}"
    form = 'give {"train": [weight, prefix, ...], "valid": [...], "test": [...]}'
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read ({error}): {form}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} is not a JSON object: {form}")
    if unknown := [key for key in content if key not in SPLITS]:
        raise ValueError(f"{name} has the keys {', '.join(map(repr, unknown))}, which are no splits: {form}")
    blends = {}
    for split in SPLITS:
        value = content.get(split)
        words = value.split() if isinstance(value, str) else [] if value is None else value
        if not isinstance(words, list) or not all(isinstance(word, str | int | float) and not isinstance(word, bool) for word in words):
            raise ValueError(f"{name}: {split!r} is not a list of weights and prefixes: {form}")
        blends[split] = tuple(map(str, words))
    if not blends["train"]:
        raise ValueError(f"{name} names no training data: {form}")
    return blends


def number_of(word: str) -> float | None:
    """Convert a word, such as one of a flag, to a number; None if it is none."""
    try:
        return float(word)
    except ValueError:
        return None


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend:
    """Parse `prefix`, `prefix prefix ...` or `weight prefix weight prefix ...`; ValueError for a mixture or a weight that is not > 0."""
    numbers = [number_of(word) for word in words]
    if all(number is None for number in numbers):
        return Blend(prefixes=list(words))
    if len(words) % 2 or any(number is not None for number in numbers[1::2]):
        raise ValueError(f"{flag} {' '.join(words)}: give prefixes alone, or a weight before each prefix")
    wrong = next((word for word, number in zip(words[::2], numbers[::2], strict=True) if not 0 < (number or 0.0) < float("inf")), None)
    if wrong is not None:
        raise ValueError(f"{flag} {' '.join(words)}: the weight {wrong} is not a number above 0; leave out datasets that you do not use")
    return Blend(prefixes=list(words[1::2]), weights=[weight for weight in numbers[::2] if weight is not None])


def parse_split(split: str) -> list[float]:
    """Parse `969,30,1` into three shares that sum to 1; ValueError unless it is one to three numbers >= 0 with a sum > 0."""
    numbers = [number_of(word.strip()) for word in split.split(",")]
    legal = [number for number in numbers if number is not None and 0 <= number < float("inf")]
    if len(legal) != len(numbers) or len(numbers) > len(SPLITS) or sum(legal) <= 0:
        raise ValueError(f"--split {split}: give one to three numbers, 0 or more, for train, valid and test, such as 969,30,1")
    legal += [0.0] * (len(SPLITS) - len(legal))
    return [number / sum(legal) for number in legal]


def describe(words: Sequence[str]) -> str | None:
    """Return a line with the shares of a weighted blend and the sum of its weights; None for a blend without weights."""
    try:
        blend = parse_blend(words)
    except ValueError:
        return None
    if blend.weights is None:
        return None
    total = sum(blend.weights)
    shares = ", ".join(f"{prefix} {100 * weight / total:.2f} %" for weight, prefix in zip(blend.weights, blend.prefixes, strict=True))
    return f"data: {shares}; the weights sum to {total:g} and are normalized"
