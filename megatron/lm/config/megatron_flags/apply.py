"""Apply the table to a command line: return the trainer's own flags, and a line for each flag that was dropped or translated."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.lm.config.megatron_flags import fp8, in_context
from megatron.lm.config.megatron_flags.in_context import Given, Values
from megatron.lm.config.megatron_flags.table import closest, find, lines_about, names
from megatron.lm.config.megatron_flags.topics.row import ACCEPTED, DROPPED, REFUSED, Verdict, spelled

JUDGES = {**in_context.JUDGES, **fp8.JUDGES}


@dataclass(frozen=True)
class Applied:
    """A command line in the trainer's own flags.

    Attributes:
        argv: arguments for argparse.
        lines: log lines about dropped and translated flags of Megatron-LM.
        given: the flags on the command line, with hyphens.
    """

    argv: tuple[str, ...]
    lines: tuple[str, ...]
    given: Given


@dataclass(frozen=True)
class _Written:
    """A flag with the words after it; an empty flag: words before the first flag."""

    flag: str
    words: Values

    def __str__(self) -> str:
        return " ".join((self.flag, *self.words)).strip()


def apply(argv: Sequence[str], known: Collection[str], preset: Mapping[str, Any] = MappingProxyType({})) -> Applied:
    """Translate a command line, with hyphens for underscores.

    Args:
        argv: the words of the command line.
        known: the trainer's own flags.
        preset: defaults of the flags, by field name.

    Raises:
        ValueError: unknown and refused flags, all in one message, each with its reason and what to do.
    """
    written, given = list(_written(argv, known)), given_by(argv, preset)
    words: list[str] = []
    problems: list[str] = []
    dropped: dict[str, list[str]] = {}
    translated: list[str] = []
    for entry in written:
        takes, verdict = _judged(entry, given, known)
        used, stray = _Written(entry.flag, entry.words[:takes]), entry.words[len(entry.words[:takes]) :]
        if verdict.treatment == ACCEPTED:
            words += verdict.becomes or (used.flag, *used.words) if used.flag else used.words
        elif verdict.treatment == REFUSED:
            problems.append(f"{used}: {verdict.says}" if verdict.says else f"unknown flag {used.flag}{_hint(used.flag, known)}")
        elif takes is not None and len(used.words) < takes:
            problems.append(f"{used} is missing a value: give {takes}")
        elif verdict.treatment == DROPPED:
            dropped.setdefault(verdict.says, []).append(str(used))
        else:
            words += verdict.becomes
            translated.append(f"{used} means {' '.join(verdict.becomes)} here")
        words += stray
    if problems:
        many = f"{len(problems)} flags are refused, nothing was started:"
        raise ValueError(problems[0] if len(problems) == 1 else "\n- ".join([many, *problems]))
    return Applied(tuple(words), (*translated, *(f"{', '.join(flags)} dropped: {why}" for why, flags in dropped.items())), given)


def given_by(argv: Sequence[str], preset: Mapping[str, Any] = MappingProxyType({})) -> Given:
    """Return a command line by flag, with a preset as defaults."""
    return Given({entry.flag: entry.words for entry in _written(argv, ()) if entry.flag}, preset)


def _written(argv: Sequence[str], known: Collection[str]) -> Iterator[_Written]:
    """Yield the flags of a command line with the words after each; `--flag=value` is a flag with one word."""
    flag, words = "", []  # type: str, list[str]
    for word in argv:
        if not word.startswith("--") or word == "--":
            words.append(word)
            continue
        if flag or words:
            yield _Written(flag, tuple(words))
        name, equals, value = word.partition("=")
        flag, words = name if name in known else spelled(name), [value] if equals else []
    if flag or words:
        yield _Written(flag, tuple(words))


def _judged(entry: _Written, given: Given, known: Collection[str]) -> tuple[int | None, Verdict]:
    """Return the number of words that belong to a flag (None: all) and its verdict; for an unknown flag, a refusal without a reason."""
    rows = lines_about(entry.flag)
    if entry.flag in known and all(row.flag.endswith("*") for row in rows):
        rows = ()  # a flag of this trainer alone is not one of Megatron-LM's family
    if not rows:
        return None, Verdict(ACCEPTED if entry.flag in known or not entry.flag else REFUSED)
    takes = None if any(row.takes is None for row in rows) else max(row.takes or 0 for row in rows)
    values = entry.words[:takes]
    row = find(entry.flag, values)
    if row is None:
        return (None, Verdict(ACCEPTED)) if entry.flag in known else (takes, Verdict(REFUSED))
    judge = JUDGES.get(entry.flag)
    enough = takes is None or len(values) == takes
    verdict = (judge(given, values) if judge and enough else None) or row.judged(values)
    return (None if verdict.treatment == ACCEPTED and not verdict.becomes else takes), verdict


def _hint(flag: str, known: Collection[str]) -> str:
    served = {name for name in names() if any(row.verdict.treatment != REFUSED for row in lines_about(name))}
    close = closest(flag, {*known, *served})
    return f" (did you mean {close}?)" if close else ""
