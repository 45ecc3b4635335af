"""Tables of losses, against the curves read by hand."""

import csv
import statistics

import pytest

from megatron.lm.evaluation.paired_difference import Interval
from tools.docs import losses
from tools.docs.evidence import ROOT


def last(path, run):
    with (ROOT / path).open(newline="", encoding="utf-8") as stream:
        return next(float(row["loss"]) for row in reversed(list(csv.DictReader(stream))) if row["run"] == run and row["kind"] == "valid")


def test_a_run_is_compared_with_bf16_of_its_seed():
    tokens, apart = losses.differences()
    by_hand = [last(losses.CURVES, f"O2_{seed}") / last(losses.CURVES, f"bf16_{seed}") - 1 for seed in range(3)]
    paired = losses.paired("O2")
    assert paired.seeds == (1234, 1235, 1236)
    assert paired.relative.mean == pytest.approx(sum(by_hand) / 3)
    assert paired.relative.half_width == pytest.approx(4.302653 * statistics.stdev(by_hand) / 3**0.5)
    assert apart["O2"][-1] == pytest.approx([sum(by_hand) / 3, min(by_hand), max(by_hand)])
    assert len(tokens) == len(apart["O2"]) == 4
    assert losses.BASE not in apart


def test_a_precision_that_was_not_compared_is_named(monkeypatch):
    monkeypatch.setattr(losses, "read", lambda file: [{"precision": "bf16"}, {"precision": "O3"}])
    assert losses.row_of("O3") == {"precision": "O3"}
    with pytest.raises(ValueError, match=r"has no row of O9, only of bf16, O3: compare_precisions\.py creates it"):
        losses.row_of("O9")


def test_a_difference_is_shown_with_its_interval_or_as_of_one_seed():
    assert losses.shown(Interval(mean=0.001, half_width=0.002)) == "+0.10 (-0.10 to +0.30)"
    assert losses.shown(Interval(mean=0.001, half_width=None)) == "+0.10 (one seed)"
    assert losses.final_losses()["bf16-d"] == {1234: last(losses.CURVES, "bf16-d_0")}


def test_runs_that_are_not_on_file_are_named():
    with pytest.raises(ValueError, match="has no run of O9, only of fp32"):
        losses.paired("O9")


def test_the_longest_run_in_words_is_the_last_column():
    table, text = losses.judged(), " ".join(losses.longest().markdown().split())
    (apart,) = (line[-1] for line in table.cells if line[0].startswith("`O3`"))
    assert f"the held-out loss ends {apart} % from BF16's" in text
    assert table.columns[-1] in text


def test_a_long_run_is_compared_with_the_first_level_of_its_file():
    assert [line[0].split("`")[1] for line in losses.longer_run(losses.LONG).cells] == ["O0", "O2", "O3", "O0"]
    assert [line[0].split("`")[1] for line in losses.longer_run().cells] == ["O0", "O3", "O2"]


def test_items_are_compared_with_o0_and_shares_are_in_percent(monkeypatch):
    row = {"items": "9", "commit": "abc", "date": "today"}
    kinds = ("documents, bits per byte", "nounpp_english, share correct", "inner_english_cont, share correct")
    rows = [row | {"kind": kind, "model": model, "value": "0.5", "above_base": above, "half_width": "0.01"}
            for kind in kinds for model, above in (("O0", "0.0"), ("O3", "0.02"))]  # fmt: skip
    monkeypatch.setattr(losses, "pick", lambda file: rows)
    table = losses.by_item()
    assert table.columns == ["items", "number", "`O0`", "`O3` less `O0`"]
    assert table.cells == [
        ["documents, bits per byte", "9", "0.5000", "+0.0200 (+0.0100 to +0.0300)"],
        ["agreement, nounpp", "9", "50.0 % correct", "+2.0 (+1.0 to +3.0)"],
        ["agreement, inner, continued", "9", "50.0 % correct", "+2.0 (+1.0 to +3.0)"],
    ]


def test_recorded_updates_are_those_of_levels_that_lose_some():
    table = losses.updates()
    assert {line[0] for line in table.cells} == {"`O2`", "`O3`"}
    assert all(float(line[4]) < 0.01 < float(line[3]) for line in table.cells)
