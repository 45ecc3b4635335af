"""FP8-LM's Table 6 and Figure 4: the rows of formats, and the curves on file."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.lm.config.cli import parse_args
from tools.docs.cells import PRECISIONS
from tools.precisions import case_flags
from tools.reproduce import curves
from tools.reproduce.compare_precisions import folder_of
from tools.reproduce.entry import Task

TASK = Task("kept", "whole", Path("text"), Path("folder"))


def test_the_rows_of_table_6_are_the_papers_formats():
    paper = {"#2a": ("fp16", "fp8-e4m3", "fp16"), "#2b": ("bf16", "fp8-e4m3", "fp16"), "#3": ("fp8-e4m3", "fp8-e4m3", "fp16")}
    paper["#4"] = ("fp16", "fp8-e4m3", "fp8-e4m3")
    for name, formats in paper.items():
        config = parse_args(["--preset", "125m", "--micro-batch-size", "1", "--train-iters", "1", *case_flags(curves.TABLE6[name])])
        from megatron.lm.planning.memory import state_formats

        states = state_formats(config)["linear"][1]
        assert tuple(str(getattr(states, key)) for key in ("master", "m", "v")) == formats, name
    assert curves.table6_pieces("full")[:7] == [*(f"{name} seed 1234" for name in curves.TABLE6), "#1 seed 1235"]
    kept = {row["precision"]: row for row in curves.read(PRECISIONS)}
    (zero,) = curves.table6(replace(TASK, size="full", piece="#0 seed 1234"))
    assert (zero.ours, zero.where["commit"]) == (float(kept["fp32"]["valid_loss"]), kept["fp32"]["commit"])


def test_figure_4_compares_runs_of_one_seed(tmp_path, monkeypatch):
    """Two seeds: BF16 ends at 4 and 5, O3 1 % above and 2 % below. Their means alone would differ by -0.67 %."""
    for model in ("small", "large"):
        (tmp_path / model).mkdir()
        with (tmp_path / model / "precisions.csv").open("w", newline="") as stream:
            columns = ("precision", "seeds", "valid_loss", "least", "most", "commit")
            csv.writer(stream).writerows([columns, ("bf16", 2, 4.5, 4, 5, "abc1234"), ("O3", 2, 4.47, 4.04, 4.9, "abc1234")])
        with (tmp_path / model / "curves.csv").open("w", newline="") as stream:
            written = csv.writer(stream)
            written.writerow(("run", "kind", "iteration", "tokens", "loss"))
            for run, loss in (("bf16_0", 4.0), ("bf16_1", 5.0), ("O3_0", 4.04), ("O3_1", 4.9)):
                written.writerows([(run, "valid", 1, 10, 9.0), (run, "valid", 2, 20, loss), (run, "train", 2, 20, loss + 1)])
    large = str(tmp_path / "large")
    monkeypatch.setattr(curves, "MODELS4", {"125M": str(tmp_path / "small"), "1.3B": large})
    monkeypatch.setattr(curves.losses, "LARGE", large)
    found = list(curves.figure4(TASK))
    lines = {finding.quantity: finding.ours for finding in found if finding.x is None}
    for model in ("125M", "1.3B"):
        told = f"O3, {model}: validation loss above BF16's, "
        half_width = 12.7062 * 1.5  # Student's t at one degree of freedom, times half of the distance of the two
        assert [lines[told + name] for name in ("mean of the seeds", "half width of the 95 % interval")] == pytest.approx(
            [-0.5, half_width]
        )
        by_seed = {(finding.quantity, finding.seed): finding.ours for finding in found}
        assert [by_seed[f"O3 at {model}: validation loss", seed] for seed in (1234, 1235)] == [4.04, 4.9]
        assert lines[f"{model}: range of BF16's own seeds"] == pytest.approx(100 / 4.5)
    drawn = [(finding.quantity, finding.x, finding.ours) for finding in found if finding.x is not None]
    expected = [("bf16", 5.0), ("O3", pytest.approx(5.04))]
    assert drawn == [(f"{name}, {model}, training loss by tokens", 20.0, loss) for model in ("125M", "1.3B") for name, loss in expected]


def test_figure_4_rounded_to_nearest_pairs_its_seeds(tmp_path, monkeypatch):
    folder = folder_of(curves.NEAREST)
    with (tmp_path / "precisions.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("precision", "seeds", "commit"), ("bf16", 2, "abc1234"), (curves.NEAREST, 2, "abc1234")])
    with (tmp_path / "curves.csv").open("w", newline="") as stream:
        losses = (("bf16_0", 4.0), ("bf16_1", 5.0), (f"{folder}_0", 4.04), (f"{folder}_1", 4.9))
        csv.writer(stream).writerows([("run", "kind", "iteration", "loss"), *((run, "valid", 2, loss) for run, loss in losses)])
    monkeypatch.setattr(curves, "NEAREST4", str(tmp_path))
    found = {(finding.quantity, finding.seed): finding.ours for finding in curves.nearest4(TASK)}
    (entry,) = [one for one in curves.ENTRIES if one.name == "fp8lm-figure4-nearest"]
    assert found[entry.headline, None] == pytest.approx(-0.5)
    assert {quantity for quantity, seed in found if seed} == set(entry.same_loss[0])


def test_figure_4_has_its_models_on_file():
    found = {finding.quantity: finding for finding in curves.figure4(TASK) if finding.x is None}
    headline = next(one.headline for one in curves.ENTRIES if one.name == "fp8lm-figure4")
    assert found[headline].paper == 0
    assert found[headline].where["gpu"] == "NVIDIA H200"
    assert {name.partition(" at ")[2].partition(":")[0] for name in found if " at " in name} == {"125M", "125M, all levels", "1.3B"}
    twelve = [finding.seed for finding in curves.figure4(TASK) if finding.quantity == "O3 at 125M: validation loss"]
    assert len(set(twelve)) == 12


def test_two_ranks_pair_the_seeds_on_file():
    (entry,) = [one for one in curves.ENTRIES if one.name == "fp8lm-two-ranks"]
    found = {(finding.quantity, finding.seed): finding for finding in curves.two_ranks(TASK)}
    head = found[entry.headline, None]
    assert (head.paper, head.where["gpu"]) == (0, "2 x NVIDIA H200")
    base, summed = ({seed for quantity, seed in found if quantity == name} for name in entry.same_loss[0])
    assert base == summed
    assert len(base) >= 2
