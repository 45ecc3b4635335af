"""The benchmark at toy size: our rows and transformers' on the same weights."""

import csv

from helpers import dist
from tools.bench import bench_generate

TINY = "--seq-length 32 --num-layers 1 --hidden-size 64 --num-attention-heads 2 --lr-warmup-iters 1"
SMALL = ["--preset", "125m", "--batch-size", "2", "--prompt", "8", "--tokens", "6", "--vocab-size", "96", "--repeats", "1"]


def measure_all(folder: str) -> list[dict[str, str]]:
    """In a process of its own: the benchmark makes the process groups."""
    arguments = [*SMALL, "--levels", "O0", "O3", "--eager", f"--flags={TINY}", "--csv", f"{folder}/generate.csv", "--commit", "abc1234"]
    assert bench_generate.main(arguments) == 0
    with open(f"{folder}/generate.csv", newline="") as stream:
        return list(csv.DictReader(stream))


def test_each_case_has_a_row_and_o0_appends_what_transformers_does(tmp_path):
    (rows,) = dist.run(measure_all, 1, str(tmp_path), init=False)
    assert [row["case"] for row in rows] == ["transformers", "O0", "O0 eager", "O3", "O3 eager"]
    assert tuple(rows[0])[5:] == bench_generate.COLUMNS
    assert all(float(row[name]) > 0 for row in rows for name in ("prefill_tokens_s", "tokens_s", "ms_token"))
    assert rows[1]["same"] == rows[2]["same"]
    assert float(rows[1]["same"]) >= 0.5, "two models of random weights would share one token in a hundred"


def test_a_prompt_beyond_the_sequence_is_refused(capsys):
    assert bench_generate.main([*SMALL, "--levels", "O0", f"--flags={TINY}", "--tokens", "25"]) == 2
    assert "--prompt 8 and --tokens 25 are more than the model's sequence of 32: give fewer" in capsys.readouterr().err
