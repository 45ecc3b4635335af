"""A line of the table: a flag of Megatron-LM, optionally with one value, and how it is treated here.

A line has the syntax of a launch script: `--seed N` takes one value, `--spec TEXT...` any number, `--use-flash-attn` none. A word that is
not in `PLACEHOLDERS` restricts the line to that value: `--context-parallel-size 1`, `--optimizer sgd`. `--moe-*` matches every flag with
that prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ACCEPTED, DROPPED, TRANSLATED, REFUSED = "accepted", "dropped", "translated", "refused"
PLACEHOLDERS = ("N", "X", "TEXT", "FILE", "FOLDER", "N...", "TEXT...")


@dataclass(frozen=True)
class Verdict:
    """What happens to a flag on a command line.

    Attributes:
        treatment: `ACCEPTED`, `TRANSLATED`, `DROPPED` or `REFUSED`.
        says: dropped: why it has no effect here; translated: what it becomes; refused: the reason and the alternative; accepted: "".
        becomes: the words that replace it; empty for a dropped flag.
    """

    treatment: str
    says: str = ""
    becomes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        line: in the syntax of a launch script.
        verdict: what happens to it.
    """

    line: str
    verdict: Verdict

    @property
    def flag(self) -> str:
        """The flag, with hyphens; ends with `*` for a family of flags."""
        return spelled(self.line.partition(" ")[0])

    @property
    def takes(self) -> int | None:
        """Number of values after the flag; None: all words up to the next flag."""
        words = self.line.split()[1:]
        return None if self.flag.endswith("*") or any(word.endswith("...") for word in words) else len(words)

    @property
    def value(self) -> str | None:
        """The value to which the line is restricted; None: any value."""
        words = self.line.split()[1:]
        return None if not words or words[0] in PLACEHOLDERS else " ".join(words)

    def serves(self, values: Sequence[str]) -> bool:
        """Return whether the line matches these values."""
        return self.value is None or _same(self.value, " ".join(values))

    def judged(self, values: Sequence[str]) -> Verdict:
        """Return the verdict with the placeholder replaced by the values of a command line."""
        words: list[str] = []
        for word in self.verdict.becomes:
            words.extend(values if word in PLACEHOLDERS else [word])
        return Verdict(self.verdict.treatment, self.verdict.says, tuple(words))


def accepted(*lines: str) -> tuple[Row, ...]:
    """Declare flags with the same name and meaning as in Megatron-LM."""
    return tuple(Row(line, Verdict(ACCEPTED)) for line in lines)


def dropped(why: str, *lines: str) -> tuple[Row, ...]:
    """Declare flags that have no effect here, for one reason."""
    return tuple(Row(line, Verdict(DROPPED, why)) for line in lines)


def refused(why: str, *lines: str) -> tuple[Row, ...]:
    """Declare flags that the trainer does not support, for one reason and with one alternative."""
    return tuple(Row(line, Verdict(REFUSED, why)) for line in lines)


def translated(becomes: str, *lines: str) -> tuple[Row, ...]:
    """Declare flags with another name here; `becomes` has the same placeholder as the lines."""
    return tuple(Row(line, Verdict(TRANSLATED, f"means {becomes} here", tuple(becomes.split()))) for line in lines)


def spelled(flag: str) -> str:
    """Replace the underscores of a flag by hyphens: `--micro_batch_size` -> `--micro-batch-size`."""
    return flag.replace("_", "-")


def setting_of(flag: str) -> str:
    """Convert a flag to its field name: `--micro-batch-size` -> `micro_batch_size`."""
    return flag[2:].replace("-", "_")


def _same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other
