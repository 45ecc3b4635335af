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


@pytest.mark.parametrize(
    ("model", "precision", "gpus"),
    [
        ("125m", "O3", 8),
        pytest.param("7b", "bf16", 32, marks=pytest.mark.nightly(60)),
        pytest.param("175b", "O3", 1024, marks=pytest.mark.nightly(60)),
    ],
)
def test_the_fastest_grid_is_what_it_says_today(model: str, precision: str, gpus: int):
    (row,) = [row for row in of("scale") if (row["model"], row["precision"], row["gpus"]) == (model, precision, str(gpus))]
    assert text(planner.scale(model, precision, gpus) or {}) == row


def test_where_nothing_fits_there_is_no_row():
    assert planner.scale("175b", "bf16", 8) is None


def test_4096_tokens_fit_32_gpus_at_o3_and_bf16_states_do_not_fit_at_any_length():
    fits = {(row["precision"], row["sequence"]): row["fits"] for row in of("context")}
    assert fits["O3", "4096"] == "yes"
    assert {fits["bf16", str(length)] for length in planner.CONTEXTS} == {"no"}


def test_more_gpus_take_less_time():
    for model in planner.SCALES:
        for precision in planner.PRECISIONS:
            times = [float(row["ms"]) for row in of("scale") if (row["model"], row["precision"]) == (model, precision)]
            assert len(times) > 2
            assert times == sorted(times, reverse=True)
