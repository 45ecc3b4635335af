"""Parse blends of datasets (`--data-path`, or a file with a weight and a prefix per line and `#` for comments) and `--split`.

Weights need not sum to 1 or 100: each dataset's share is its weight divided by their sum (`describe` returns it).
"""

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


def number_of(word: str) -> float | None:
    """Convert a word of a flag to a number; None if it is a name."""
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
