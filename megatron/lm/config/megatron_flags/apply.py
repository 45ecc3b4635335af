"""Apply the table to a command line: return the trainer's own flags, and a line for each flag that was dropped or translated."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.lm.config.blend_file import number_of
from megatron.lm.config.megatron_flags.table import (
    ACCEPTED,
    DROPPED,
    PLACEHOLDERS,
    REFUSED,
    TRANSLATED,
    DefaultRow,
    GivenFlags,
    closest,
    find,
    rows,
    rows_of,
    spelled,
)
from megatron.lm.config.sections.training import TOKENIZERS

Values = tuple[str, ...]
STATE_FORMATS = {  # the trainer's flag -> Megatron-LM's
    "--master-format": "--main-params-dtype",
    "--grad-format": "--main-grads-dtype",
    "--exp-avg-format": "--exp-avg-dtype",
    "--exp-avg-sq-format": "--exp-avg-sq-dtype",
}


@dataclass(frozen=True)
class Applied:
    """A command line in the trainer's own flags.

    Attributes:
        argv: arguments for argparse.
        lines: log lines about dropped and translated flags of Megatron-LM.
    """

    argv: tuple[str, ...]
    lines: tuple[str, ...]


class Verdict(NamedTuple):
    """What happens to a flag on a command line: the attributes of `FlagRow`, with the values of the command line for placeholders."""

    treatment: str
    why: str = ""
    becomes: Values = ()


ONE_LENGTH = Verdict(DROPPED, "GPT has a single sequence length, --seq-length")


class WrittenFlag(NamedTuple):
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
    given = given_by(argv, preset)
    words: list[str] = []
    problems: list[str] = []
    dropped: dict[str, list[str]] = {}
    translated: list[str] = []
    for entry in _written(argv, known):
        takes, verdict = _judged(entry, given, known)
        used = WrittenFlag(entry.flag, entry.words[:takes])
        if verdict.treatment == ACCEPTED:
            words += verdict.becomes or (used.flag, *used.words) if used.flag else used.words
        elif verdict.treatment == REFUSED and verdict.why:
            problems.append(f"{used}: {verdict.why}")
        elif verdict.treatment == REFUSED:
            close = closest(used.flag, {*known, *(row.flag for row in rows() if row.treatment != REFUSED)})
            problems.append(f"unknown flag {used.flag}" + (f" (did you mean {close}?)" if close else ""))
        elif takes is not None and len(used.words) < takes:
            problems.append(f"{used} is missing a value: give {takes}")
        elif verdict.treatment == DROPPED:
            dropped.setdefault(verdict.why, []).append(str(used))
        else:
            words += verdict.becomes
            translated.append(f"{used} means {' '.join(verdict.becomes)} here")
        words += entry.words[len(used.words) :]
    if problems:
        many = f"{len(problems)} flags are refused, nothing was started:"
        raise ValueError(problems[0] if len(problems) == 1 else "\n- ".join([many, *problems]))
    return Applied(tuple(words), (*translated, *(f"{', '.join(flags)} dropped: {why}" for why, flags in dropped.items())))


def given_by(argv: Sequence[str], preset: Mapping[str, Any] = MappingProxyType({})) -> GivenFlags:
    """Return a command line by flag, with a preset as defaults."""
    return GivenFlags({entry.flag: entry.words for entry in _written(argv, ()) if entry.flag}, preset)


def _written(argv: Sequence[str], known: Collection[str]) -> Iterator[WrittenFlag]:
    """Yield the flags of a command line with the words after each; `--flag=value` is a flag with one word."""
    flag, words = "", []  # type: str, list[str]
    for word in argv:
        if not word.startswith("--") or word == "--":
            words.append(word)
            continue
        if flag or words:
            yield WrittenFlag(flag, tuple(words))
        name, equals, value = word.partition("=")
        flag, words = name if name in known else spelled(name), [value] if equals else []
    if flag or words:
        yield WrittenFlag(flag, tuple(words))


def _judged(entry: WrittenFlag, given: GivenFlags, known: Collection[str]) -> tuple[int | None, Verdict]:
    """Return the number of words that belong to a flag (None: all) and its verdict; for an unknown flag, a refusal without a reason."""
    own = rows_of(entry.flag)
    if entry.flag in known and all(row.flag.endswith("*") for row in own):
        own = ()  # a flag of this trainer alone is not one of Megatron-LM's family
    if not own:
        return None, Verdict(ACCEPTED if entry.flag in known or not entry.flag else REFUSED)
    takes = None if any(row.takes is None for row in own) else max(row.takes or 0 for row in own)
    values = entry.words[:takes]
    row = find(entry.flag, values, given)
    if row is None:
        return (None, Verdict(ACCEPTED)) if entry.flag in known else (takes, Verdict(REFUSED))
    becomes: list[str] = []
    for word in row.becomes:
        becomes.extend(values if word in PLACEHOLDERS else [word])
    verdict = Verdict(row.treatment, row.why, tuple(becomes))
    if entry.flag in COMPUTED and not row.conditional and len(values) == takes:
        verdict = COMPUTED[entry.flag](given, values) or verdict
    return (None if verdict.treatment == ACCEPTED and not verdict.becomes else takes), verdict


def _level(given: GivenFlags, values: Values) -> Verdict | None:
    """`--bf16 --fp8-format hybrid` computes linear layers in FP8, from BF16 weights with FP32 masters, gradients and moments: O1 with FP32
    formats here, whose stored weight is FP16. With `--fp8-param-gather`, which stores and gathers FP8 weights, it is O3 with FP32 formats.
    Formats that other flags give take precedence."""
    if values[0] not in ("hybrid", "e4m3"):
        return None
    words = ["--opt-level", "O3" if "--fp8-param-gather" in given.flags or "--fp8-param" in given.flags else "O1"]
    for ours, theirs in STATE_FORMATS.items():
        if ours in given.flags or theirs in given.flags or ("--exp-avg" in ours and "--optimizer-state" in given.flags):
            continue
        words += [ours, "bf16" if ours == "--grad-format" and "--grad-reduce-in-bf16" in given.flags else "fp32"]
    return Verdict(TRANSLATED, "", tuple(words))


def _split(given: GivenFlags, values: Values) -> Verdict | None:
    """Strip the quotes that a script leaves around the value when it expands an array unquoted; Megatron-LM reads only the numbers."""
    bare = tuple(value.strip("'\"") for value in values)
    return Verdict(ACCEPTED, becomes=("--split", *bare)) if bare != values else None


def _weight_decay_end(given: GivenFlags, values: Values) -> Verdict | None:
    ends = {given.value(flag) for flag in ("--weight-decay", "--start-weight-decay", "--end-weight-decay")}
    if len({number_of(end) for end in ends if end is not None} - {None}) > 1:
        return Verdict(REFUSED, "weight decay is constant here: give --weight-decay alone")
    return None


def _virtual_stages(given: GivenFlags, values: Values) -> Verdict | None:
    layers, stages, virtual = given.count("--num-layers"), given.count("--pipeline-model-parallel-size") or 1, values[0]
    if not virtual.isdecimal() or not int(virtual):
        return Verdict(REFUSED, "give a whole number above 0")
    if int(virtual) == 1:
        return Verdict(DROPPED, "one virtual stage per pipeline stage interleaves nothing")
    if stages == 1:
        return Verdict(DROPPED, "there is only one pipeline stage")
    parts = stages * int(virtual)
    if layers is None or layers % parts:
        return Verdict(
            REFUSED, f"--num-layers {layers} is not divisible by {stages} pipeline stages x {virtual}: choose a multiple of {parts}"
        )
    return Verdict(TRANSLATED, "", ("--num-layers-per-virtual-pipeline-stage", str(layers // parts)))


def _multiple_of(given: GivenFlags, values: Values) -> Verdict | None:
    """LLaMA's width of a SwiGLU, two thirds of 4 hidden sizes, rounded up to a multiple, as in forks that have this flag."""
    hidden, multiple = given.count("--hidden-size"), int(values[0]) if values[0].isdecimal() else 0
    if hidden is None or not multiple or "--swiglu" not in given or "--ffn-hidden-size" in given.flags:
        return None
    width = -(-(8 * hidden // 3) // multiple) * multiple
    return Verdict(TRANSLATED, "", ("--ffn-hidden-size", str(width)))


def _tokenizer_type(given: GivenFlags, values: Values) -> Verdict | None:
    if values[0] in TOKENIZERS or any(row.value == values[0] for row in rows_of("--tokenizer-type")):
        return None
    return Verdict(
        REFUSED,
        f"choose one of {', '.join(TOKENIZERS)}: HuggingFaceTokenizer reads the tokenizer.json of most models by --tokenizer-model FOLDER",
    )


# Flags whose verdict is computed from their value and other flags, unless a row with conditions applies.
COMPUTED: Mapping[str, Callable[[GivenFlags, Values], Verdict | None]] = {
    "--fp8-format": _level,
    "--fp8-hybrid": lambda given, values: _level(given, ("hybrid",)),
    "--split": _split,
    "--start-weight-decay": _weight_decay_end,
    "--end-weight-decay": _weight_decay_end,
    "--num-virtual-stages-per-pipeline-rank": _virtual_stages,
    "--decoder-seq-length": lambda given, values: ONE_LENGTH if values[0] == given.value("--seq-length") else None,
    "--multiple-of": _multiple_of,
    "--tokenizer-type": _tokenizer_type,
}


def described(some: Sequence[DefaultRow]) -> str:
    """Return a log line with each default, Megatron-LM's and the trainer's."""
    listed = ", ".join(f"{default.what} {default.megatron} -> {default.ours}" for default in some)
    return f"defaults that differ, Megatron-LM core_v0.16.1 -> here (--megatron-defaults uses Megatron-LM's): {listed}"
