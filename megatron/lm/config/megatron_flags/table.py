"""The rows of `flags.toml`, which describes its own syntax, lookup of a flag among them, and the end of `--help`."""

import difflib
import functools
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from megatron.lm.config.sections.precision import recipe_by_name

ACCEPTED, DROPPED, TRANSLATED, REFUSED = TREATMENTS = ("accepted", "dropped", "translated", "refused")
PLACEHOLDERS = ("N", "X", "TEXT", "FILE", "FOLDER", "N...", "TEXT...")
PAGE = "docs/reference/megatron_flags.md"
WIDTH = 132
HEADING = "Megatron flags"
EXAMPLES = """examples:
  a small model on the data of `make quickstart`, on one GPU or a CPU:
    msamp pretrain --preset 125m --opt-level O2 --data-path data/quickstart/train_text_document \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/quickstart/tokenizer.json --train-iters 100
  the memory per process of a large run, without starting it:
    WORLD_SIZE=64 msamp pretrain --preset llama3-8b --opt-level O3 --dry-run
  eight GPUs, with checkpoints that the same command resumes from:
    msamp torchrun --nproc-per-node 8 msamp pretrain --preset 1.3b --opt-level O3 --data-path DATA --tokenizer-type \\
        HuggingFaceTokenizer --tokenizer-model tokenizer.json --save RUN --load RUN --save-interval 1000
"""


@dataclass(frozen=True)
class GivenFlags:
    """A command line by flag.

    Attributes:
        flags: flag with hyphens -> its values, from its last occurrence.
        preset: defaults of absent flags, by field name.
    """

    flags: Mapping[str, tuple[str, ...]]
    preset: Mapping[str, Any] = field(default_factory=dict)

    def __contains__(self, flag: str) -> bool:
        return flag in self.flags or bool(self.preset.get(setting_of(flag)))

    def value(self, flag: str) -> str | None:
        """Return the first value of a flag, or the preset's; None if both are absent."""
        if flag in self.flags:
            return self.flags[flag][0] if self.flags[flag] else None
        value = self.preset.get(setting_of(flag))
        return None if value is None else str(value)

    def count(self, flag: str) -> int | None:
        """Return the value as a whole number; None if it is absent or not a whole number."""
        value = self.value(flag)
        return int(value) if value is not None and value.isdecimal() else None

    def meets(self, condition: str) -> bool:
        """Return whether the command line meets a condition of `with` or `without`."""
        flag, _, value = condition.partition(" ")
        if flag.startswith("--"):
            return self.value(flag) == value if value else flag in self
        name = self.value("--opt-level") or self.value("--precision")
        try:
            recipe = None if name is None else recipe_by_name(name)
        except ValueError:  # argparse or `check` reports it
            return False
        return recipe is not None and recipe.fp8 and (condition == "an FP8 recipe" or recipe.weight.bytes == 1)


@dataclass(frozen=True, kw_only=True)
class Conditional:
    """What applies only to some command lines: those with one of `needed`, if there are any, and without all of `excluded`."""

    needed: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    def applies(self, given: GivenFlags) -> bool:
        """Return whether it applies to this command line."""
        return (not self.needed or any(map(given.meets, self.needed))) and not any(map(given.meets, self.excluded))


@dataclass(frozen=True, kw_only=True)
class FlagRow(Conditional):
    """A flag of Megatron-LM, and what happens to it.

    Attributes:
        subject: heading of its part of the documentation.
        line: the flag as in a launch script, with a placeholder for any value.
        treatment: one of `TREATMENTS`.
        why: dropped: why it has no effect here; refused: the reason and the alternative; accepted: a limit, or "".
        becomes: the words that replace a translated flag.
    """

    subject: str
    line: str
    treatment: str
    why: str = ""
    becomes: tuple[str, ...] = ()

    @functools.cached_property
    def flag(self) -> str:
        """The flag, with hyphens; ends with `*` for a family of flags."""
        return spelled(self.line.partition(" ")[0])

    @functools.cached_property
    def takes(self) -> int | None:
        """Number of values after the flag; None: all words up to the next flag."""
        words = self.line.split()[1:]
        return None if self.flag.endswith("*") or any(word.endswith("...") for word in words) else len(words)

    @functools.cached_property
    def value(self) -> str | None:
        """The value to which the row is restricted; None: any value."""
        words = self.line.split()[1:]
        return None if not words or words[0] in PLACEHOLDERS else " ".join(words)

    @property
    def conditional(self) -> bool:
        """Whether it applies only to some command lines."""
        return bool(self.needed or self.excluded)

    def serves(self, values: Sequence[str]) -> bool:
        """Return whether these values are the row's; numbers are compared as such."""
        given = " ".join(values)
        try:
            return self.value is None or self.value == given or float(self.value) == float(given)
        except ValueError:
            return False


@dataclass(frozen=True, kw_only=True)
class DefaultRow(Conditional):
    """A default that differs from Megatron-LM's: of `what`, `megatron`'s and `ours`, and the `settings` of Megatron-LM's by field name."""

    what: str
    megatron: str
    ours: str
    settings: Mapping[str, Any]


@functools.cache
def _file() -> Mapping[str, list[dict[str, Any]]]:
    return tomllib.loads(resources.files("megatron.lm.config.megatron_flags").joinpath("flags.toml").read_text(encoding="utf-8"))


def _conditions(block: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {"needed": tuple(block.get("with", ())), "excluded": tuple(block.get("without", ()))}


@functools.cache
def rows() -> tuple[FlagRow, ...]:
    """Return all rows, in the order of the file."""
    return tuple(
        FlagRow(
            subject=subject,
            line=line,
            treatment=treatment,
            why=block.get("why", ""),
            becomes=tuple(block.get("becomes", "").split()),
            **_conditions(block),
        )
        for subject, blocks in _file().items()
        if subject != "defaults"
        for block in blocks
        for treatment in TREATMENTS
        for line in block.get(treatment, ())
    )


@functools.cache
def defaults() -> tuple[DefaultRow, ...]:
    """Return the defaults that differ from Megatron-LM's."""
    return tuple(
        DefaultRow(what=block["what"], megatron=block["megatron"], ours=block["ours"], settings=block.get("set", {}), **_conditions(block))
        for block in _file()["defaults"]
    )


@functools.cache
def _by_flag() -> Mapping[str, tuple[FlagRow, ...]]:
    """Return the rows of each flag: those with conditions first, then those of one value."""
    by_flag: dict[str, list[FlagRow]] = {}
    for row in rows():
        by_flag.setdefault(row.flag, []).append(row)
    return {flag: tuple(sorted(some, key=lambda row: (not row.conditional, row.value is None))) for flag, some in by_flag.items()}


@functools.cache
def rows_of(flag: str) -> tuple[FlagRow, ...]:
    """Return the rows that may serve a flag (with hyphens): its own, then those of its families; empty if it is unknown."""
    by_flag = _by_flag()
    families = sorted((name for name in by_flag if name.endswith("*") and flag.startswith(name[:-1])), key=len, reverse=True)
    return tuple(row for name in (flag, *families) for row in by_flag.get(name, ()))


def find(flag: str, values: Sequence[str], given: GivenFlags) -> FlagRow | None:
    """Return the row for a flag (with hyphens) with these values on this command line; None if there is none."""
    return next((row for row in rows_of(flag) if row.serves(values) and row.applies(given)), None)


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` probably misspells; None if all are too different."""
    return next(iter(difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.8)), None)


def spelled(flag: str) -> str:
    """Replace the underscores of a flag by hyphens: `--micro_batch_size` -> `--micro-batch-size`."""
    return flag.replace("_", "-")


def setting_of(flag: str) -> str:
    """Convert a flag to its field name: `--micro-batch-size` -> `micro_batch_size`."""
    return flag[2:].replace("-", "_")


def help_sections() -> str:
    """Return the end of `--help`: how Megatron-LM's flags are treated, and three examples."""
    parts = [f"{HEADING} (the log gives the reasons for those that a run drops or translates; see {PAGE}):"]
    for treatment, label in ((TRANSLATED, "translated"), (DROPPED, "dropped, since they have no effect here"), (REFUSED, "refused")):
        some = [row for row in rows() if row.treatment == treatment and not row.conditional and row.subject != "removed"]
        lines = [f"{row.line} -> {' '.join(row.becomes)}" if treatment == TRANSLATED else row.line for row in some]
        joined = ", ".join(line.replace(" ", "\0") for line in lines)  # a flag and its value stay on one line
        listed = textwrap.fill(joined, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False).replace("\0", " ")
        parts.append(f"  {label}:\n{listed}")
    return "\n".join(parts) + "\n\n" + EXAMPLES
