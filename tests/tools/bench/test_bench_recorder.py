"""The recorder's benchmark, whole, on a tiny model."""

import csv

import pytest

from helpers import dist
from tools.bench import bench_recorder

TINY = "--seq-length 16 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --lr-warmup-iters 1 --fp8-min-gain 0"


def measured(folder: str, level: str, more: list[str]) -> dict[str, str]:
    """In a separate process: the benchmark creates the process groups."""
    arguments = ["--level", level, "--preset", "125m", "--micro-batch-size", "2", "--vocab-size", "64", "--warm-up", "1", "--steps", "2"]
    assert bench_recorder.main([*arguments, *more, f"--flags={TINY}", "--csv", f"{folder}/recorder.csv", "--commit", "abc1234"]) == 0
    with open(f"{folder}/recorder.csv", newline="") as stream:
        (row,) = csv.DictReader(stream)
    return row


@pytest.mark.parametrize(
    ("level", "more", "case", "interval"), [("O3", [], "O3", 500), ("O2", ["--check-lost-updates"], "O2, check for lost updates", 50)]
)
def test_a_row_has_plain_and_observed_steps(tmp_path, level, more, case, interval):
    (row,) = dist.run(measured, 1, str(tmp_path), level, more, init=False)
    assert (row["commit"], row["case"], row["preset"], row["interval"], row["graphs"]) == ("abc1234", case, "125m", str(interval), "0")
    plain, observed = float(row["ms"]), float(row["recorded_ms"])
    assert plain > 0
    assert observed > 0
    assert float(row["share_percent"]) == pytest.approx(100 * (observed - plain) / (interval * plain), rel=0.2, abs=2e-2)
    assert (row["line_kib"] == "") == bool(more)
    assert more or float(row["line_kib"]) > 1
