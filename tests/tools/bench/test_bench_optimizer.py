import argparse
import csv

import pytest
import torch

from megatron.lm.config.sections.precision import build_recipe
from msamp.numerics import recipe
from msamp.numerics.tensor import ScalingTensor
from tools.bench import bench_optimizer

TINY = "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 4"
LINEAR, MATRIX, VECTOR = 2 * 12 * 64, 20 * 8, 8 * 14 + 2 * 7 * 8  # elements; the vocabulary has 16


def options(flags: str = "") -> argparse.Namespace:
    return argparse.Namespace(preset="125m", micro_batch_size=1, flags=f"{TINY} {flags}", vocab_size=16, repeats=3, commit="abc")


CASES = ["quantisation, scales anew", "quantisation", "step", "step in a graph"]


def weights(level: str, flags: str = "") -> bench_optimizer.Weights:
    config = bench_optimizer.configuration(level, options(flags))
    return bench_optimizer.Weights(config.model, build_recipe(config.precision), 16, "cpu")


@pytest.mark.parametrize(
    ("level", "linear", "matrix"),
    # Gradient twice, in E4M3 once; m, v and master there and back; the weight beside a master once.
    [("O1", 1 + 2 * (4 + 4 + 2), 4 + 2 * (4 + 4 + 2) + 2), ("O2", 1 + 2 * (1 + 2 + 2), 16), ("O3", 1 + 2 * (1 + 2 + 2) + 1, 16)],
)
def test_bytes_by_hand(level, linear, matrix):
    model = weights(level)
    assert [sum(p.numel() for p in group["params"]) for group in model.groups()] == [LINEAR, MATRIX, VECTOR]
    assert all(isinstance(p, ScalingTensor) for p in model.groups()[0]["params"])
    step, quantisation, anew = model.bytes()
    assert step == linear * LINEAR + matrix * MATRIX + (8 + 24 + 2) * VECTOR
    assert quantisation == 3 * LINEAR + 4 * MATRIX + 6 * VECTOR
    assert anew == quantisation + 3 * LINEAR


@pytest.mark.parametrize(
    ("level", "each", "quantisation"),
    [
        ("fp32", 2 * 4 + 2 * (4 + 4 + 4), 4 + 4),
        ("fp16-amp", 2 * 4 + 2 * (4 + 4 + 4) + 2, 2 + 4),
        ("bf16", 2 * 4 + 2 * (4 + 4 + 4) + 2, 2 + 4),
        ("bf16-a", 2 * 2 + 2 * (2 + 2 + 2), 2 + 2),
        ("bf16-dmw", 2 * 2 + 2 * (4 + 4 + 2), 2 + 2),
        ("bf16-d", 2 * 2 + 2 * (4 + 4 + 4) + 2, 2 + 2),
        ("collage-light", 2 * 2 + 2 * (2 + 2 + 4), 2 + 2),
        ("collage-plus", 2 * 2 + 2 * (2 + 4 + 4), 2 + 2),
    ],
)
def test_bytes_of_precisions_without_fp8_by_hand(level, each, quantisation):
    elements = LINEAR + MATRIX + VECTOR
    assert weights(level).bytes() == (each * elements, quantisation * elements, quantisation * elements)


def test_the_flags_choose_the_states():
    # A row of 8 or 32 has one group: payload, maximum and exponent of each moment. A linear weight, a layer: rows of 8, and 8 rows of 32.
    groups = 2 * (3 * 8 + 8 + 4 * 8 + 8) + (16 + 4)
    step, *_ = weights("O3", "--optimizer-state coat").bytes()
    assert step == (1 + 2 * (1 + 1 + 2) + 1) * LINEAR + (4 + 2 * (1 + 1 + 2) + 2) * MATRIX + 34 * VECTOR + 2 * 2 * 8 * groups


@pytest.mark.parametrize(("level", "flags"), [*((level, "") for level in ("O0", *recipe.names())), ("bf16", "--optimizer-state coat")])
def test_every_precision_is_measured(level, flags, monkeypatch):
    """On a CPU, with a clock that says 1, 2 and 4 milliseconds."""

    def pretend(prepare, run, repeats):
        prepare()
        run()
        return [1.0, 2.0, 4.0]

    monkeypatch.setattr(bench_optimizer, "times", pretend)
    monkeypatch.setattr(bench_optimizer, "graphed", lambda step: step)
    given = options(flags)
    found = bench_optimizer.measure(bench_optimizer.configuration(level, given), given, 1e9, "cpu")
    assert [row["case"] for row in found] == CASES
    step, quantisation, anew = weights(level, flags).bytes()
    for row, size in zip(found, [anew, quantisation, step, step], strict=True):
        assert (row["ms"], row["bytes_per_param"]) == (2.0, round(size / (LINEAR + MATRIX + VECTOR), 3))
        assert row["share"] == pytest.approx(size / 2e-3 / 1e9, abs=5e-4)
        assert row["level"].split()[0] == ("bf16" if level == "O0" else level)
        assert flags in row["level"]


def test_a_level_may_have_flags_of_its_own(monkeypatch):
    monkeypatch.setattr(bench_optimizer, "times", lambda prepare, run, repeats: [1.0, 2.0, 4.0])
    monkeypatch.setattr(bench_optimizer, "graphed", lambda step: step)
    level, given = "O3 --optimizer-state coat", options()
    found = bench_optimizer.measure(bench_optimizer.configuration(level, given), given, 1e9, "cpu", flags="--optimizer-state coat")
    step, *_ = weights("O3", "--optimizer-state coat").bytes()
    assert {row["level"] for row in found} == {f"{level} {TINY}"}
    assert found[-1]["bytes_per_param"] == round(step / (LINEAR + MATRIX + VECTOR), 3)


def test_torch_takes_the_same_step(monkeypatch):
    """Each implementation in turn, with a clock that says 1, 2 and 4 milliseconds, and the bytes of option D's own update."""

    def pretend(prepare, run, repeats):
        run()
        return [1.0, 2.0, 4.0]

    monkeypatch.setattr(bench_optimizer, "times", pretend)
    given = options()
    found = bench_optimizer.by_torch(bench_optimizer.configuration("bf16-d", given), given, 1e9, "cpu")
    assert [row["case"] for row in found] == [f"step by torch, {name}" for name in bench_optimizer.TORCH]
    assert {row["level"] for row in found} == {f"bf16-d {TINY}"}
    step, *_ = weights("bf16-d").bytes()
    assert {row["bytes_per_param"] for row in found} == {round(step / (LINEAR + MATRIX + VECTOR), 3)}


@pytest.mark.parametrize("level", ["O2", "bf16-a", "bf16-dmw", "fp32"])
def test_torch_is_compared_with_option_d_only(level, capsys):
    assert bench_optimizer.main(["--levels", "bf16-d", level, "--by-torch", f"--flags={TINY}"]) == 2
    assert f"--by-torch: {level} is not BF16 weights with FP32 masters and moments: give --levels bf16-d" in capsys.readouterr().err


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_optimizer.main([]) == 1
    assert "requires a GPU" in capsys.readouterr().err


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
