"""Predicted against measured memory at every level, in small models on a CPU, and what is told where they differ."""

import csv
import shlex
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.lm.config import Config
from megatron.lm.model import linear
from megatron.lm.planning import memory
from megatron.lm.processes.cpu_home import cpu_home
from tools import memory_report
from tools.memory_report import Alive, Row, activations, configuration, states

SHAPE = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 2 --seq-length 32 --micro-batch-size 4 --lr 1e-3 --vocab-size 60 "
    "--make-vocab-size-divisible-by 32 --tokenizer-type NullTokenizer --fp8-min-gain 0"
)
CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="follows the storages of a CPU")
NIGHTLY = pytest.mark.nightly(5)
FP16 = "fp16-amp --initial-loss-scale 1e9"
CASES = {
    "fp16-amp": (),
    "O0": NIGHTLY,
    "O0 --recompute-granularity selective --recompute-modules mlp core_attn": NIGHTLY,
    "O1": NIGHTLY,
    "O2 --swiglu --ffn-hidden-size 512 --group-query-attention --num-query-groups 1 --disable-bias-linear": (),
    "O2 --qk-layernorm --hidden-size 512 --num-attention-heads 4 --group-query-attention --num-query-groups 2": (),
    "O2 --bf16-linears linear_qkv linear_fc2": NIGHTLY,
    "O2 --bf16-linears linear_qkv --recompute-granularity selective --recompute-modules mlp core_attn": NIGHTLY,
    "O3": NIGHTLY,
    "O2 --save-activations coat": NIGHTLY,
    "O2 --save-activations coat --swiglu --ffn-hidden-size 512 --recompute-granularity selective --recompute-modules core_attn": (),
    "O0 --save-activations coat --swiglu --ffn-hidden-size 512": NIGHTLY,
    "O3 --optimizer-state coat": NIGHTLY,
    "O3 --normalization RMSNorm --recompute-granularity selective --recompute-modules mlp core_attn": NIGHTLY,
}


def config(text: str) -> Config:
    level, *flags = shlex.split(text)
    return configuration(level, [*SHAPE.split(), *flags])


@CPU
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks) for case, marks in CASES.items()])
def test_the_activations_are_the_predicted_ones(case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "native_bf16", lambda device: True)  # as on a GPU; a CPU without keeps FP32 copies for its BF16 GEMMs
    found = {row.what: row for row in activations(config(case))}
    assert list(found) == [f"activations, {name}" for name in ("norms", "attention", "MLP", "layer")]
    for row in found.values():
        assert abs(row.difference) <= 1.5, row  # the norms' statistics, a few bytes a token
    assert found["activations, layer"].measured > 0


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "level",
    [
        *("collage-fp8", "coat", "O2 --bf16-linears linear_qkv"),
        *(pytest.param(level, marks=NIGHTLY) for level in (FP16, "O0", "bf16-d", "collage-plus", "O1", "O3")),
    ],
)
def test_the_states_are_the_predicted_ones(level: str):
    found = [row for row in states(config(level)) if row.unit == "bytes per parameter"]
    assert [row.what for row in found] == ["weight", "master", "m", "v", "gradient"]
    for row in found:
        assert row.measured == pytest.approx(row.predicted, rel=1e-6), row
    assert sum(row.measured for row in found) > 6


def test_storages_are_followed_until_they_are_freed():
    held, old = [], torch.zeros(8)
    with Alive() as alive:
        held.append(torch.zeros(16))
        held.append(held[0][2:])  # a view
        held.append(old[1:])  # of what was there before
        held.append(torch.ones(4) + torch.ones(4))  # two are gone, one stays
    assert alive.size() == 64 + 16
    held.pop()
    assert alive.size() == 64


@pytest.mark.parametrize(
    ("row", "percent"),
    [
        (Row("a", "", 100.0, 103.0), 3.0),
        (Row("a", "", 100.0, 90.0), -10.0),
        (Row("a", "", 0.0, 1.0, 50.0), 2.0),
        (Row("a", "", 0.0, 0.0), 0.0),
        (Row("a", "", 0.0, 1.0), 100.0),
    ],
)
def test_differences_are_percents_of_the_prediction(row: Row, percent: float):
    assert row.difference == pytest.approx(percent)


def test_one_table_one_csv_and_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    real = memory.activation_parts
    arguments = [*SHAPE.split(), "--levels", "O3", "--csv", str(tmp_path / "memory.csv"), "--commit", "abc1234"]
    arguments += ["--recompute-granularity", "selective", "--recompute-modules", "mlp"]
    monkeypatch.setattr(memory_report, "layer_bytes", lambda config, **widths: sum(real(config).values()) // (2 if widths else 1))
    monkeypatch.setattr(memory, "activation_parts", lambda config: {"norms": 10**6, "attention": 1, "MLP": 0})
    with cpu_home():
        assert memory_report.main(arguments) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["predicted", "measured", "difference"]
    with (tmp_path / "memory.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [row["what"] for row in table][:5] == ["weight", "master", "m", "v", "gradient"]
    assert len(table) == len([line for line in printed[1:] if line.startswith("O3 ")]) == 9 + 2 * torch.cuda.is_available()
    assert {(row["case"], row["hidden"], row["recompute"], row["commit"]) for row in table} == {("O3", "256", "selective mlp", "abc1234")}


def test_within_the_limit_the_exit_status_is_0(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_report, "states", lambda config: [Row("weight", "", 1.0, 1.029)])
    monkeypatch.setattr(memory_report, "activations", lambda config: [Row("activations", "", 1.0, 0.971)])
    with cpu_home():
        assert memory_report.main([*SHAPE.split(), "--levels", "O0", "O3"]) == 0
        monkeypatch.setattr(memory_report, "states", lambda config: [Row("weight", "", 1.0, 1.031)])
        assert memory_report.main([*SHAPE.split(), "--levels", "O0"]) == 1


def test_flags_that_contradict_each_other_are_refused(capsys: pytest.CaptureFixture[str]):
    assert memory_report.main([*SHAPE.split(), "--levels", "O3", "--recompute-modules", "mlp"]) == 2
    assert "--recompute-modules mlp has no effect by itself" in capsys.readouterr().err


@pytest.mark.parametrize("preset", ["13b", "175b"])
def test_any_preset_on_one_process(preset: str):
    made = configuration("O3", ["--preset", preset, "--fp8-min-gain", "0"])
    assert (made.parallel.tensor_model_parallel_size, made.num_micro_batches(1)) == (1, 1)


@pytest.mark.gpu
def test_a_whole_preset_on_a_gpu():
    # Large enough that the workspaces of cuBLAS (0.14 GiB) are small beside it.
    arguments = ["--preset", "1.3b", "--levels", "O0", "O3", "--micro-batch-size", "4", "--fp8-min-gain", "0"]
    assert memory_report.main(arguments) == 0


def test_the_stand_in_for_attention_keeps_four_tensors():
    x = torch.randn(3, 2, 2, 4, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = memory_report.KeepingAttention()(x, x, x, None)
    assert out.shape == (3, 2, 8)
    assert len(kept) == 4
