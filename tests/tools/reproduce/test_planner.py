"""The planner on FP8-LM's clusters: the rows on file are what it says today."""

import csv

import pytest

from tools.reproduce import planner

with planner.FILE.open(encoding="utf-8", newline="") as stream:
    ROWS = list(csv.DictReader(stream))


def text(row: dict) -> dict[str, str]:
    return {key: str(value) for key, value in row.items()}


def of(what: str) -> list[dict[str, str]]:
    return [row for row in ROWS if row["what"] == what]


def test_table_5_is_what_it_says_today():
    assert [text(planner.table5(*line)) for line in planner.TABLE_5] == of("table5")


@pytest.mark.parametrize(("precision", "sequence"), [("O3", 4096), ("bf16", 2048)])
def test_the_context_is_what_it_says_today(precision: str, sequence: int):
    (row,) = [row for row in of("context") if (row["precision"], row["sequence"]) == (precision, str(sequence))]
    assert text(planner.context(precision, sequence)) == row


def test_4096_tokens_fit_32_gpus_at_o3_and_bf16_states_do_not_fit_at_any_length():
    fits = {(row["precision"], row["sequence"]): row["fits"] for row in of("context")}
    assert fits["O3", "4096"] == "yes"
    assert {fits["bf16", str(length)] for length in planner.CONTEXTS} == {"no"}
