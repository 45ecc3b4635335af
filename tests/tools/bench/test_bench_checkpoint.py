import csv

import pytest

from helpers import dist
from tools.bench import bench_checkpoint

TINY = "--seq-length 16 --num-layers 1 --hidden-size 128 --num-attention-heads 2 --lr-warmup-iters 1"


def measure_all(folder: str) -> list[dict[str, str]]:
    """In a process of its own: the benchmark makes the process groups."""
    arguments = ["--levels", "O0", "O3", "--preset", "125m", "--micro-batch-size", "2", "--vocab-size", "64", "--warm-up", "1"]
    arguments += ["--steps", "2", f"--flags={TINY}", "--csv", f"{folder}/checkpoint.csv", "--commit", "abc1234", "--folder", folder]
    assert bench_checkpoint.main(arguments) == 0
    with open(f"{folder}/checkpoint.csv", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.nightly
def test_a_level_a_row_and_fp8_is_smaller(tmp_path):
    ((bf16, fp8),) = dist.run(measure_all, 1, str(tmp_path), init=False)
    assert (bf16["case"], fp8["case"]) == ("O0", "O3")
    assert tuple(bf16)[5:] == bench_checkpoint.COLUMNS
    assert 14 < float(bf16["bytes_param"]) < 15  # BF16 weights, FP32 master and moments, and some names
    assert float(fp8["bytes_param"]) < 0.6 * float(bf16["bytes_param"])
    assert all(float(row[name]) > 0 for row in (bf16, fp8) for name in ("save_s", "stall_s", "write_s", "ms", "load_s"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.csv"]
