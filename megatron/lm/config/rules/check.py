"""Validate a configuration before anything is allocated or written: one ValueError lists every problem.

Single values are checked against the choices and intervals of their fields, and combinations of settings by the `rules`.
"""

from dataclasses import fields

from megatron.lm.config.rules import data, experts, outputs, precision, shape, training
from megatron.lm.config.rules.table import conflicts
from megatron.lm.config.sections.schema import choices_of, flag
from megatron.lm.config.whole import Config, Problems, Rules

RULES: Rules = shape.RULES | experts.RULES | precision.RULES | training.RULES | data.RULES | outputs.RULES


def check(config: Config, world_size: int) -> None:
    """Raise a ValueError with every setting that is out of range, contradicts another or is not supported.

    `world_size` is the number of processes. Checks the file system (whether files exist and folders are writable), but writes nothing; the
    result is the same on every process that sees the same files.
    """
    problems: list[str] = []
    broken: set[str] = set()
    for section in (f.name for f in fields(config)):
        invalid = list(single_values(getattr(config, section)))
        problems += invalid
        broken |= {section} if invalid else set()
    problems += conflicts(config, broken)
    for rule, sections in RULES.items():
        if not broken & set(sections):
            problems += rule(config, world_size)
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise ValueError("\n- ".join([f"{len(problems)} settings are refused, nothing was started:", *problems]))


def single_values(section: object) -> Problems:
    """Check choices and intervals of one section, from the metadata of its fields. Empty text, as from an unset variable, is refused."""
    for setting in fields(section):  # type: ignore[arg-type]
        value, legal = getattr(section, setting.name), setting.metadata["legal"]
        if value in (None, ()):
            continue
        choices = choices_of(setting)
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            # Bytes of the command line that are not UTF-8 appear as lone surrogates.
            if isinstance(one, str) and any("\ud800" <= character <= "\udfff" for character in one):
                yield f"{flag(setting.name)} {one!a} is not valid UTF-8: rename it, or the file"
            elif isinstance(one, str) and not one.strip():
                yield f"{flag(setting.name)} {one!r} is empty (is a shell variable unset?): give a value, or drop the flag"
            elif choices is not None and one not in choices:
                yield f"{flag(setting.name)} {one}: choose one of {', '.join(choices)}"
        for one in values:
            if legal is not None and one not in legal:
                yield f"{flag(setting.name)} {one}: give a number in {legal}"
