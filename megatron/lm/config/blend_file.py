"""A blend of datasets in a file: the words that `--data-path` takes, a weight and a prefix a line, `#` before a comment.

Weights need not add up to 1 or to 100: what counts is each one's share of their sum (`describe` tells it).
"""

from collections.abc import Sequence
from pathlib import Path


def read_blend(path: str) -> tuple[str, ...]:
    """The words of a file, `--data-args-path`.

    Raises:
        ValueError: it cannot be read, is no UTF-8, or holds no word.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--data-args-path {path} cannot be read ({error}): give a text file, a weight and a prefix a line") from None
    words = tuple(word for line in text.splitlines() for word in line.partition("#")[0].split())
    if not words:
        raise ValueError(f"--data-args-path {path} names no dataset: write a weight and a prefix a line")
    return words


def number_of(word: str) -> float | None:
    """The number that a word of a flag spells; None where it is a name."""
    try:
        return float(word)
    except ValueError:
        return None


def describe(words: Sequence[str]) -> str | None:
    """One line on the shares of a blend with weights, and what they add up to; None for one without."""
    if len(words) < 2 or len(words) % 2:
        return None
    weights = [weight for weight in map(number_of, words[::2]) if weight is not None]
    total = sum(weights) if 2 * len(weights) == len(words) else 0.0
    if not 0 < total < float("inf"):
        return None
    shares = ", ".join(f"{prefix} {100 * weight / total:.2f} %" for weight, prefix in zip(weights, words[1::2], strict=True))
    return f"data: {shares}; the weights add up to {total:g} and are taken as shares of that"
