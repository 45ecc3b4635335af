""""""

import argparse
import csv

import pytest

from megatron.lm.config.sections.precision import build_recipe
from tools.bench import bench_kernels, bench_optimizer
from tools.bench.bench_kernels import Case

TINY = "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 4"
LINEAR, MATRIX, VECTOR = 2 * 12 * 64, 20 * 8, 8 * 14 + 2 * 7 * 8  # elements; the vocabulary has 16
CASES = ["quantisation, scales anew", "quantisation", "step", "step in a graph"]


def options(flags: str = "") -> argparse.Namespace:
    return argparse.Namespace(preset="125m", micro_batch_size=1, flags=f"{TINY} {flags}", vocab_size=16, repeats=3, commit="abc")


def step_bytes(level: str) -> tuple[int, int, int]:
    config = bench_optimizer.configuration(level, options())
    return bench_optimizer.Weights(config.model, build_recipe(config.precision), 16, "cpu").bytes()


@pytest.fixture
def clock(monkeypatch):
    """A clock that shows 1, 2 and 4 milliseconds, and steps that are not captured."""

    def pretend(prepare, run, repeats):
        prepare()
        run()
        return [1.0, 2.0, 4.0]

    monkeypatch.setattr(bench_optimizer, "times", pretend)
    monkeypatch.setattr(bench_optimizer, "captured", lambda step: step)


def test_bytes_by_hand():
    """Gradient twice, in E4M3 once; m, v and master there and back; a weight that has a master once."""
    step, quantisation, anew = step_bytes("O3")
    assert step == (1 + 2 * (1 + 2 + 2) + 1) * LINEAR + 16 * MATRIX + (8 + 24 + 2) * VECTOR
    assert quantisation == 3 * LINEAR + 4 * MATRIX + 6 * VECTOR
    assert anew == quantisation + 3 * LINEAR
    assert step_bytes("collage-plus")[0] == (2 * 2 + 2 * (2 + 4 + 4)) * (LINEAR + MATRIX + VECTOR)


@pytest.mark.parametrize("level", ["O0", "O3 --optimizer-state coat", "fp16-amp", "collage-plus"])
def test_a_precision_is_measured(level, clock):
    given, (_, _, flags) = options(), level.partition(" ")
    table = bench_optimizer.measure(bench_optimizer.configuration(level, given), given, 1e9, "cpu", flags=flags)
    assert [row["case"] for row in table] == CASES
    step, quantisation, anew = step_bytes(level)
    for row, size in zip(table, [anew, quantisation, step, step], strict=True):
        assert (row["ms"], row["bytes_per_param"]) == (2.0, round(size / (LINEAR + MATRIX + VECTOR), 3))
        assert row["share"] == pytest.approx(size / 2e-3 / 1e9, abs=5e-4)
        assert row["level"] == f"{level.replace('O0', 'bf16')} {TINY}"


def test_torch_takes_the_same_step(clock):
    given = options()
    table = bench_optimizer.by_torch(bench_optimizer.configuration("bf16-d", given), given, 1e9, "cpu")
    assert [row["case"] for row in table] == [f"step by torch, {name}" for name in bench_optimizer.TORCH]
    assert {row["bytes_per_param"] for row in table} == {round(step_bytes("bf16-d")[0] / (LINEAR + MATRIX + VECTOR), 3)}


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["fp16-amp", "collage-plus", "O3"])
def test_a_table_of_a_tiny_model(level, tmp_path):
    file = tmp_path / "optimizer.csv"
    arguments = ["--preset", "125m", "--levels", level, "--repeats", "3", "--csv", str(file), "--commit", "abc", f"--flags={TINY}"]
    assert bench_optimizer.main(arguments) == 0
    with file.open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [row["case"] for row in table] == CASES
    assert all(float(row["ms"]) > 0 and row["level"].startswith(level) for row in table)


def test_a_row_compares_bytes_or_flops_with_the_ceiling(monkeypatch):
    """Of launches that take 1, 2 and 3 microseconds, next to ceilings of 4 TB/s and 800 TFLOP/s."""
    monkeypatch.setattr(bench_kernels, "times", lambda run, repeats: [repeats * 1e-6, 2e-6, 1e-6])
    moved, multiplied = (bench_kernels.measure(Case("x", int, **size), 3, 4e12, 800e12) for size in ({"bytes": 6e6}, {"flops": 4e8}))
    assert moved == {"kernel": "x", "us_p20": 1.4, "us": 2.0, "us_p80": 2.6, "tb_s": 3.0, "tflops": "", "share": 0.75}
    assert (multiplied["tb_s"], multiplied["tflops"], multiplied["share"]) == ("", 200, 0.25)


def test_every_case_runs():
    for case in bench_kernels.elementwise(64, 128, "cpu"):
        case.run()
        assert case.bytes > 0


@pytest.mark.gpu
def test_a_table_of_small_kernels(tmp_path):
    file = tmp_path / "kernels.csv"
    small = "--tokens 2048 --hidden 256 --repeats 3 --only elementwise gemm --commit abc"
    assert bench_kernels.main([*small.split(), "--csv", str(file)]) == 0
    with file.open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert {"cast", "norm", "GELU", "FP8 GEMM, grad_weight"} <= {row["kernel"] for row in table}
    assert all(float(row["us"]) > 0 and float(row["share"]) > 0 for row in table)
