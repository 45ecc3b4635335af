"""Declaration of a setting: a dataclass field with help, choices and legal interval, and the name of its flag.

Each field of a section is a flag: the field's name with dashes (Megatron-LM's name if Megatron-LM has the flag). `cli` generates the flags
and `check` validates the values. `None` always means "derived": a property of the same section derives the value. Nothing here depends on
the machine or imports torch, so a misspelled flag is reported immediately. A name that can be registered, such as a recipe's, is looked up
when its value is checked.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

Choices = tuple[str, ...] | Callable[[], tuple[str, ...]]


@dataclass(frozen=True)
class Range:
    """Legal values of a numeric setting; NaN and infinities are never legal."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = self.low < value if self.low_open else self.low <= value
        below = value < self.high if self.high_open or math.isinf(self.high) else value <= self.high
        return above and below

    def __str__(self) -> str:
        opening, closing = "(" if self.low_open else "[", ")" if self.high_open or math.isinf(self.high) else "]"
        return f"{opening}{self.low:.10g}, {self.high:.10g}{closing}"


# Counts fit 32 bits, like the indices of data and of torch's kernels; numbers fit FP32 with headroom for a product.
LARGEST_COUNT, LARGEST = 2**31 - 1, 1e30
COUNT = Range(1, LARGEST_COUNT)
COUNT_OR_ZERO = Range(0, LARGEST_COUNT)
SIZE = Range(1, 2**24)  # of one dimension of a tensor
POSITIVE = Range(0, LARGEST, low_open=True)
NON_NEGATIVE = Range(0, LARGEST)
DECAY_RATE = Range(0, 0.9999999)  # less than 1 in FP32, too
PROBABILITY = Range(0, 1, high_open=True)
SHARE = Range(0, 1)
DECIBEL = Range(-100, 100)


def flag(name: str) -> str:
    """Convert a field name to its flag: `num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")


def setting(help: str, default: Any = MISSING, choices: Choices | None = None, legal: Range | None = None) -> Any:
    """Return a dataclass field with help text, choices or legal interval; it is required if `default` is omitted.

    Choices that can be registered are a function that returns them.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "legal": legal})


def names_in(module: str, attribute: str) -> Callable[[], tuple[str, ...]]:
    """Return choices that are the names in a collection of `module`, or what its function returns; imported when they are needed."""

    def names() -> tuple[str, ...]:
        collection = getattr(importlib.import_module(module), attribute)
        return tuple(collection() if callable(collection) else collection)

    return names


def choices_of(setting: Field) -> tuple[str, ...] | None:
    """Return the current choices of a setting; None if any value of its type is allowed."""
    choices = setting.metadata["choices"]
    return choices() if callable(choices) else choices
