"""The recorder's benchmark, whole, on a tiny model."""

import csv

import pytest

from helpers import dist
from tools.bench import bench_recorder

TINY = "--seq-length 16 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --lr-warmup-iters 1 --fp8-min-gain 0"


def measured(folder: str) -> dict[str, str]:
    """In a process of its own: the benchmark makes the process groups."""
    arguments = ["--level", "O3", "--preset", "125m", "--micro-batch-size", "2", "--vocab-size", "64", "--warm-up", "1", "--steps", "2"]
    assert bench_recorder.main([*arguments, f"--flags={TINY}", "--csv", f"{folder}/recorder.csv", "--commit", "abc1234"]) == 0
    with open(f"{folder}/recorder.csv", newline="") as stream:
        (row,) = csv.DictReader(stream)
    return row


def test_a_row_tells_plain_and_recorded_steps(tmp_path):
    (row,) = dist.run(measured, 1, str(tmp_path), init=False)
    assert (row["commit"], row["case"], row["preset"], row["interval"], row["graphs"]) == ("abc1234", "O3", "125m", "500", "0")
    plain, recorded = float(row["ms"]), float(row["recorded_ms"])
    assert plain > 0
    assert float(row["share_percent"]) == pytest.approx(100 * (recorded - plain) / (500 * plain), rel=0.2, abs=2e-3)
    assert float(row["line_kib"]) > 1
