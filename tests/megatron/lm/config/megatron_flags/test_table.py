"""The table: every flag of Megatron-LM has a line, and every line of public scripts is treated as its block says."""

import shlex
from pathlib import Path

import pytest

from helpers.megatron_lines import BY_LINE
from megatron.lm.config.cli import known_flags
from megatron.lm.config.megatron_flags.apply import apply
from megatron.lm.config.megatron_flags.table import TABLE, closest, distance_of, find, lines_about, names
from megatron.lm.config.megatron_flags.topics.row import ACCEPTED, DROPPED, REFUSED, TRANSLATED, spelled

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


KNOWN = ("--train-iters", "--lr", "--override-data", "--min-lr", "--tensor-model-parallel-size", "--seed")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--trian-iters", "--train-iters"),
        ("--train-iter", "--train-iters"),
        ("--tarin-iter", "--train-iters"),
        ("--sede", "--seed"),
        ("--mock-data", None),
        ("--max-lr", None),
        ("--tensor-parallel-size", None),
        ("--lr", "--lr"),
    ],
)
def test_only_a_slip_of_the_fingers_is_hinted_at(word, meant):
    assert closest(word, KNOWN) == meant


@pytest.mark.parametrize(
    ("one", "other", "slips"),
    [("ab", "ab", 0), ("ab", "ba", 1), ("abc", "abd", 1), ("abc", "ab", 1), ("abcd", "badc", 2), ("abcd", "wxyz", 3)],
)
def test_slips_are_counted_up_to_the_most(one, other, slips):
    assert distance_of(one, other, 2) == slips
    assert distance_of(other, one, 2) == slips
