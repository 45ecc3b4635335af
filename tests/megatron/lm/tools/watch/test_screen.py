"""The lines of `msamp watch`."""

import math
from pathlib import Path

import pytest

from helpers import watched
from helpers.watched import START, lines, train
from megatron.lm.tools.watch.run_files import WatchedRun, runs_below
from megatron.lm.tools.watch.screen import ASCII_BLOCKS, curve, percent, screen
from megatron.lm.tools.watch.status import Status

RUNNING = Status("running", "running at iteration 30 of 100")


def text(runs: list[WatchedRun]) -> str:
    for run in runs:
        run.update()
    return "\n".join("  ".join(part.text for part in line) for line in screen(runs, [RUNNING] * len(runs)))


def test_a_curve_has_blocks_between_the_bounds() -> None:
    assert curve([0.0, 3.5, 7.0, 8.0], 0.0, 8.0) == "▁▄██"
    assert curve([0.0, 8.0], 0.0, 8.0, ASCII_BLOCKS) == "_@"
    assert curve([5.0, 5.0], 5.0, 5.0) == "▁▁"
    assert curve([1.0, math.nan, None], 0.0, 8.0) == "▂!!"
    assert len(curve([float(i) for i in range(1000)], 0.0, 999.0)) == 40
    assert curve([], 0.0, 1.0) == ""


def test_a_run_has_loss_speed_and_the_worst_layers(tmp_path: Path) -> None:
    said = text(runs_below(watched.folder(tmp_path / "O2")))
    assert "O2  O2  running at iteration 30 of 100" in said
    assert "loss        2.0000  █▅▁  nats per token, from 4.0000" in said
    assert "tokens/s     1,500  ▁▁▁  all processes, median 1,500" in said
    assert "lr 1.00e-03, gradient norm 1, 0.50 GiB, 0 skipped" in said
    assert "underflow at iteration 30, % of non-zero values that became zero; 2 worst of 2 layers" in said
    assert [line.split() for line in said.splitlines() if ".fc1" in line] == [
        ["a.fc1", "30.000", "-", "0", "-"],
        ["b.fc1", "0", "-", "-", "-"],
    ]
    assert "share a scale" not in said


def test_two_runs_share_the_scale_of_their_curves(tmp_path: Path) -> None:
    watched.folder(tmp_path / "O2", {"kind": "valid", "iteration": 30, "loss": 2.5, "bits_per_byte": 1.25})
    lines(
        tmp_path / "O0" / "metrics.jsonl", START, train(10, 8.0), train(20, 4.0), {"kind": "spike", "iteration": 20, "loss": 4, "mean": 1}
    )
    said = text(sorted(runs_below(tmp_path), key=lambda run: run.name))
    assert "8.0000" in said
    assert "  4.0000  █▃  nats" in said
    assert "  2.0000  ▃▂▁  nats" in said  # between 2 and 8
    assert "valid       2.5000  at iteration 30, 1.2500 bits per byte" in said
    assert "iteration 20: loss 4 is a spike over its mean of 1" in said
    assert "Curves of one kind share a scale" in said


def test_it_says_why_there_is_no_underflow_by_layer(tmp_path: Path) -> None:
    path = lines(tmp_path / "m.jsonl", START, train(10, None))
    said = text([WatchedRun(name="a", metrics=path)])
    assert "loss      not finite  !  nats per token, from not finite" in said
    assert "not recorded; --record-precision FILE in the folder of the metrics file records it (of all gradients: 0.020 %)" in said
    assert "the precision record has no step yet" in text([WatchedRun(name="a", metrics=path, record=tmp_path / "none")])
    assert "underflow by layer: two files" in text([WatchedRun(name="a", metrics=path, unclear="two files")])


@pytest.mark.parametrize(("share", "shown"), [(None, "-"), (0.0, "0"), (1e-7, "<0.001"), (5e-6, "0.001"), (0.25, "25.000")])
def test_a_share_as_percentage(share: float | None, shown: str) -> None:
    assert percent(share) == shown
