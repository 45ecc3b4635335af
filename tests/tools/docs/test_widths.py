"""Speed by width: each pair is of one card, and each ratio is that of the rows."""

import statistics

import pytest

from tools.docs import widths
from tools.docs.cells import pick


def test_the_lines_are_ordered_by_width_and_each_has_its_ratio():
    table = widths.speeds()
    lines = [dict(zip(table.columns, cells, strict=True)) for cells in table.cells]
    assert [line["width"] for line in lines] == ["576", "768", "2048", "2048", "4096"]
    for line in lines:
        slow, fast = (float(line[f"`{level}`, tokens/s"].removesuffix("k")) for level in ("O0", "O3"))
        assert float(line["times O0's speed"]) == pytest.approx(fast / slow, abs=0.01)


def test_the_narrowest_model_is_of_the_rows_of_fine_tuning():
    """Their medians over the seeds of the newest commit."""
    rows = pick(widths.TUNED, lambda row: row["model"] == "smollm2")
    speeds = [statistics.median(float(row["tokens_per_s"]) for row in rows if (row["recipe"], row["commit"]) == (level, rows[-1]["commit"]))
              for level in ("O0", "O3")]  # fmt: skip
    narrow = widths.speeds().cells[0]
    assert narrow[3:] == [*(f"{speed / 1000:.1f}k" for speed in speeds), f"{speeds[1] / speeds[0]:.2f}"]


def test_a_pair_is_of_one_card():
    for _, rows in widths.speeds().sources:
        assert len({row["gpu"] for row in rows}) == 1


def test_what_two_cards_did_together_is_said():
    """The longer run ran on two, and its rows count the tokens of both."""
    assert [cells[2] for cells in widths.speeds().cells if cells[1] == "GPT-125M"] == ["CUDA graphs, two cards together"]
