"""The table: every flag of Megatron-LM has a line, and every line of public scripts is treated as its block says."""

import shlex
from pathlib import Path

import pytest

from helpers.megatron_lines import BY_LINE
from megatron.lm.config.cli import known_flags
from megatron.lm.config.megatron_flags.apply import apply
from megatron.lm.config.megatron_flags.row import ACCEPTED, DROPPED, REFUSED, TRANSLATED, spelled
from megatron.lm.config.megatron_flags.table import TABLE, find, lines_about, names

ROWS = [row for rows in TABLE.values() for row in rows]
NAMES = (Path(__file__).parents[4] / "helpers" / "megatron_flag_names.txt").read_text().split()


def treatment(line: str) -> str:
    """What the strongest of a line's flags meets."""
    try:
        applied = apply(shlex.split(line), known_flags())
    except ValueError as error:
        return "unknown" if "unknown flag" in str(error) else REFUSED
    if any(" dropped: " in told for told in applied.lines):
        return DROPPED
    return TRANSLATED if applied.lines else ACCEPTED


def test_the_lines_are_those_that_were_tried():
    assert len(BY_LINE) == 235


@pytest.mark.promise(
    "Megatron flags", "Each of 235 flag lines of public Megatron-LM scripts is accepted, translated, dropped or refused as listed."
)
def test_each_line_of_public_scripts_is_treated_as_listed():
    assert {line: treatment(line) for line in BY_LINE} == BY_LINE


def test_every_flag_of_megatron_lm_has_a_line():
    assert len(NAMES) > 600
    assert [name for name in NAMES if not lines_about(spelled(name))] == []


def test_an_accepted_flag_is_one_of_the_trainer_and_a_translated_one_becomes_such():
    known = known_flags()
    accepted = [row.flag for row in ROWS if row.verdict.treatment == ACCEPTED]
    becomes = [word for row in ROWS for word in row.verdict.becomes if word.startswith("--")]
    assert [flag for flag in (*accepted, *becomes) if flag not in known] == []


def test_a_flag_of_the_trainer_is_dropped_or_refused_for_single_values_alone():
    known, shadowed = known_flags(), {DROPPED, REFUSED}
    assert [row.line for row in ROWS if row.flag in known and row.value is None and row.verdict.treatment in shadowed] == []


def test_every_line_is_listed_once_and_has_its_reason():
    listed = [row.line for row in ROWS]
    assert sorted(listed) == sorted(set(listed))
    assert [row.line for row in ROWS if (row.verdict.treatment == ACCEPTED) != (row.verdict.says == "")] == []


def test_a_family_serves_the_flags_that_have_no_line_of_their_own():
    assert "--moe-*" in {row.flag for row in lines_about("--moe-something-new")}
    assert find("--hybrid-attention-ratio", ["0.0"]).verdict.treatment == DROPPED
    assert find("--hybrid-attention-ratio", ["0.5"]).verdict.treatment == REFUSED
    assert find("--no-such-flag", []) is None
    assert "--moe-*" not in names()
