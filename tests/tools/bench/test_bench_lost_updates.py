"""The benchmark of the check for lost updates, whole, on a tiny model."""

import csv

import pytest

from helpers import dist
from tools.bench import bench_lost_updates

TINY = "--seq-length 16 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --lr-warmup-iters 1 --fp8-min-gain 0"


def measured(folder: str) -> dict[str, str]:
    """In a process of its own: the benchmark makes the process groups."""
    arguments = ["--level", "O2", "--preset", "125m", "--micro-batch-size", "2", "--vocab-size", "64", "--warm-up", "1", "--steps", "2"]
    assert bench_lost_updates.main([*arguments, f"--flags={TINY}", "--csv", f"{folder}/lost.csv", "--commit", "abc1234"]) == 0
    with open(f"{folder}/lost.csv", newline="") as stream:
        (row,) = csv.DictReader(stream)
    return row


def test_a_row_has_plain_and_checked_steps(tmp_path):
    (row,) = dist.run(measured, 1, str(tmp_path), init=False)
    assert (row["commit"], row["case"], row["preset"], row["interval"], row["graphs"]) == ("abc1234", "O2", "125m", "50", "0")
    plain, checked = float(row["ms"]), float(row["checked_ms"])
    assert plain > 0
    assert checked > 0
    assert float(row["share_percent"]) == pytest.approx(100 * (checked - plain) / (50 * plain), rel=0.2, abs=2e-2)
