"""Every section's fields are well formed; intervals and flags."""

import dataclasses
import math
from typing import get_type_hints

import pytest

from megatron.lm.config import Config, Interval, OptimizerConfig, flag
from megatron.lm.config.sections import schema
from megatron.lm.config.sections.schema import choices_of

SECTIONS = get_type_hints(Config)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_fields_carry_help_and_legal_defaults(section):
    hints = get_type_hints(section)
    for setting in dataclasses.fields(section):
        assert setting.metadata["help"], setting.name
        numeric = hints[setting.name] in (int, float, int | None, float | None, tuple[int, ...])
        assert (setting.metadata["legal"] is not None) == numeric, f"{setting.name}: numbers have a legal interval, nothing else has"
        if setting.default in (dataclasses.MISSING, None, ()):
            continue
        if choices := choices_of(setting):
            defaults = setting.default if isinstance(setting.default, tuple) else (setting.default,)
            assert set(defaults) <= set(choices), setting.name
        if numeric:
            values = setting.default if isinstance(setting.default, tuple) else (setting.default,)
            assert all(value in setting.metadata["legal"] for value in values), setting.name


def test_flag_names_are_unique_over_the_sections():
    names = [setting.name for section in SECTIONS.values() for setting in dataclasses.fields(section)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("interval", "text", "inside", "outside"),
    [
        (schema.COUNT, "[1, 2147483647]", [1, 2.5, 2**31 - 1], [0, -1, 2**31, math.inf, math.nan]),
        (schema.POSITIVE, "(0, 1e+30]", [1e-30], [0, -0.0, 1e38, math.inf, math.nan]),
        (schema.PROBABILITY, "[0, 1)", [0, 0.999], [1, -1e-9, math.nan]),
        (Interval(0, 1, low_open=True), "(0, 1]", [1], [0, 1.1]),
        (Interval(0, 2**31 - 1), "[0, 2147483647]", [2**31 - 1], [2**31]),
    ],
)
def test_interval(interval, text, inside, outside):
    assert str(interval) == text
    assert all(value in interval for value in inside)
    assert not any(value in interval for value in outside)


def test_sections_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OptimizerConfig(lr=1.0).lr = 2.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        OptimizerConfig(1e-3)  # type: ignore[call-arg, misc]


def test_choices_that_can_be_registered_are_asked_each_time():
    names = ["a"]

    @dataclasses.dataclass(frozen=True)
    class Section:
        kind: str = schema.setting("kind", "a", choices=lambda: tuple(names))

    (field,) = dataclasses.fields(Section)
    assert choices_of(field) == ("a",)
    names.append("b")
    assert choices_of(field) == ("a", "b")
    assert flag("num_layers") == "--num-layers"
