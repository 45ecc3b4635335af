"""The rules of `rules.toml`, which describes their syntax: what settings require of each other, and what excludes each other."""

import functools
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any, get_type_hints

from megatron.lm.config.sections.schema import flag
from megatron.lm.config.whole import Config, Problems

PLACEHOLDERS = ("FOLDER", "N", "TEXT", "X")


def _peer_layers(config: Config) -> bool:
    from megatron.lm.config.sections.baselines import PeerRecipe  # torch

    return isinstance(config.precision.named, PeerRecipe)


PRECISIONS: dict[str, Callable[[Config], bool]] = {
    "--opt-level O1, O2 or O3": lambda config: config.precision.named.fp8,
    "--fp16": lambda config: config.precision.named.scales_loss,
    "--precision te-*": _peer_layers,
}


@dataclass(frozen=True)
class Condition:
    """A condition on one setting.

    Attributes:
        text: as in the file.
        section, name: the setting.
        holds: whether a configuration meets it.
    """

    text: str
    section: str
    name: str
    holds: Callable[[Config], bool]

    def shown(self, config: Config) -> str:
        """Return the flag with the value that a configuration has."""
        if self.text in PRECISIONS:
            return f"--precision {config.precision.name}"
        value = getattr(getattr(config, self.section), self.name)
        if value is True:
            return flag(self.name)
        words = " ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)
        return f"{flag(self.name)} {words}"


@dataclass(frozen=True)
class RuleRow:
    """A rule: `given` needs, or with `excluded` does not go with, `other`; `why` may be empty."""

    given: Condition
    other: Condition
    why: str
    excluded: bool

    @functools.cached_property
    def sections(self) -> set[str]:
        """The sections that it reads, and "recipe" if it depends on the recipe that they select."""
        recipe = {"recipe"} if {self.given.text, self.other.text} & PRECISIONS.keys() else set()
        return {self.given.section, self.other.section} | recipe

    def problem(self, config: Config) -> str | None:
        """Return the message for a configuration that breaks the rule; None if it does not."""
        if not self.given.holds(config) or self.other.holds(config) != self.excluded:
            return None
        given = self.given.shown(config)
        if self.excluded:
            other = self.other.shown(config)
            return (
                f"{given} does not go with {other}: {self.why}; drop one"
                if self.why
                else f"{given} and {other} contradict each other: drop one"
            )
        fix = f"add it, or drop {given.partition(' ')[0]}"
        if self.why:
            return f"{given} needs {self.other.text}: {self.why}; {fix}"
        return f"{given} has no effect without {self.other.text}: {fix}"


@functools.cache
def _settings() -> dict[str, tuple[str, str, Any]]:
    """Return section, name and default of each setting, by flag."""
    sections = get_type_hints(Config)
    return {flag(f.name): (section, f.name, f.default) for section, cls in sections.items() for f in fields(cls)}


def _condition(text: str) -> Condition:
    if text in PRECISIONS:
        return Condition(text, "precision", "precision", PRECISIONS[text])
    words = text.split()
    section, name, default = _settings()[words[0]]
    above = float(words[2]) if words[1:2] == ["above"] else None
    legal = frozenset(word for word in words[1:] if word != "or" and word not in PLACEHOLDERS)

    def holds(config: Config) -> bool:
        value = getattr(getattr(config, section), name)
        if above is not None:
            return value is not None and value > above
        if not legal:
            return value != default
        return any(str(one) in legal for one in (value if isinstance(value, tuple) else (value,)))

    return Condition(text, section, name, holds)


@functools.cache
def rows() -> tuple[RuleRow, ...]:
    """Return all rules, with one for each flag of a family."""
    file = tomllib.loads(resources.files("megatron.lm.config.rules").joinpath("rules.toml").read_text(encoding="utf-8"))
    rules = []
    for kind in ("needs", "excludes"):
        for given, other, *why in file[kind]:
            family = given.endswith("-*") and given not in PRECISIONS
            names = [name for name in _settings() if name.startswith(given[:-1])] if family else [given]
            rules += [RuleRow(_condition(name), _condition(other), " ".join(why), kind == "excludes") for name in names]
    return tuple(rules)


def conflicts(config: Config, broken: Collection[str] = (), only: Collection[str] = (), about: str | None = None) -> Problems:
    """Yield a message for each rule that a configuration breaks.

    Args:
        config: to validate.
        broken: sections with invalid values; rules that read them are skipped.
        only: sections; only the rules that read no others.
        about: a field name; only the rules with this setting.
    """
    unclear = set(broken) | ({"recipe"} if "precision" not in broken and config.precision.contradiction is not None else set())
    for row in rows():
        chosen = not unclear & row.sections and (not only or row.sections <= set(only)) and about in (None, row.given.name, row.other.name)
        if chosen and (problem := row.problem(config)) is not None:
            yield problem
