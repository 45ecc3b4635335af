"""The declaration of a setting: a field with its help, its choices and its legal interval; and the spelling of its flag.

A field of a section is a flag: its name with dashes is the spelling (Megatron-LM's wherever Megatron-LM has the flag). `cli` generates the
flags and `check` judges the values. `None` always means "derived": a property of the same section says from what. Nothing here looks at the
machine or imports torch, so that a misspelt flag is reported at once. A name that can be registered, such as a recipe's, is looked up where
its value is checked.
"""

import math
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

Choices = tuple[str, ...] | Callable[[], tuple[str, ...]]


@dataclass(frozen=True)
class Interval:
    """Legal values of a numeric setting; NaN and infinities are never among them."""

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


# Counts fit 32 bits, as the indices of data and torch's kernels have them; numbers fit FP32 with room for a product.
LARGEST_COUNT, LARGEST = 2**31 - 1, 1e30
COUNT = Interval(1, LARGEST_COUNT)
COUNT_OR_ZERO = Interval(0, LARGEST_COUNT)
SIZE = Interval(1, 2**24)  # of one dimension of a tensor
POSITIVE = Interval(0, LARGEST, low_open=True)
NON_NEGATIVE = Interval(0, LARGEST)
DECAY_RATE = Interval(0, 0.9999999)  # in FP32 still below 1
PROBABILITY = Interval(0, 1, high_open=True)


def flag(name: str) -> str:
    """Field name -> flag: `num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")


def setting(help: str, default: Any = MISSING, choices: Choices | None = None, legal: Interval | None = None) -> Any:
    """A dataclass field with its help text, its choices or its legal interval; required where `default` is left out.

    Choices that can be registered are a function that gives them.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "legal": legal})


def choices_of(setting: Field) -> tuple[str, ...] | None:
    """The choices of a setting as they are now; None where any value of its type will do."""
    choices = setting.metadata["choices"]
    return choices() if callable(choices) else choices
