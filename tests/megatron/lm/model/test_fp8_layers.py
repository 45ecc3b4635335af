"""The choice between FP8 and BF16 linear layers: by whom, from which table, alike on all ranks; and runs with some of both."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import tiny
from megatron.lm.config import LINEARS, Config, PrecisionConfig
from megatron.lm.model import fp8_layers
from megatron.lm.model.fp8_layers import Fp8LayerChoice, Measure, Shape, Times
from msamp.numerics.recipe import Recipe

SOME = ["linear_qkv", "linear_fc2"]
TIMES = {(32, 96): Times(3.0, 4.0), (32, 32): Times(1.0, 2.0), (32, 128): Times(8.0, 4.0), (128, 32): Times(8.0, 5.0)}


class Table:
    """A measurement with made-up times by (inputs, outputs); remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Shape] = []

    def __call__(self, shape: Shape, recipe: Recipe) -> Times:
        self.asked.append(shape)
        return TIMES[shape.inputs, shape.outputs]


def choose(settings: Config, measure: Any, saved: PrecisionConfig | None = None) -> Fp8LayerChoice:
    return fp8_layers.choose(*tiny.parts(settings), measure, saved)


def config(folder: Path, **settings: Any) -> Config:
    return tiny.config("unread", **{"opt_level": "O2", "fp8_min_gain": 1.0, "fp8_gain_cache": str(folder / "gain.json"), **settings})


# Who decides


def test_fused_layers_are_decided_together_by_the_sum_of_their_times(tmp_path: Path):
    choice = choose(config(tmp_path), Table())
    assert choice.bf16 == ()
    assert choice.gains == dict.fromkeys(LINEARS, 20 / 15)
    assert choose(config(tmp_path, fp8_min_gain=1.4), Table()).bf16 == LINEARS
    assert choose(config(tmp_path, fp8_min_gain=20 / 15), Table()).bf16 == ()  # no less than asked for


@pytest.mark.parametrize("settings", [{"hidden_dropout": 0.1}, {"tensor_model_parallel_size": 1, "hidden_dropout": 0.5}])
def test_layers_that_are_not_fused_are_decided_one_by_one(tmp_path: Path, settings: dict[str, Any]):
    choice = choose(config(tmp_path, **settings), Table())
    assert choice.bf16 == ("linear_qkv", "linear_proj")
    assert choice.gains == {"linear_qkv": 0.75, "linear_proj": 0.5, "linear_fc1": 2.0, "linear_fc2": 1.6}


def test_shapes_are_those_of_a_tensor_parallel_rank(tmp_path: Path):
    made = config(tmp_path, tensor_model_parallel_size=2, swiglu=True, ffn_hidden_size=48)
    assert fp8_layers.layer_shapes(made.model, made.parallel, 3) == {
        "linear_qkv": Shape(48, 32, 48),
        "linear_proj": Shape(48, 16, 32),
        "linear_fc1": Shape(48, 32, 48),
        "linear_fc2": Shape(48, 24, 32),
    }


def refuse(*_: Any) -> Any:
    raise AssertionError("nothing was to be measured, and no checkpoint to be read")


SAVED = PrecisionConfig(opt_level="O1", bf16_linears=("linear_fc1",))


@pytest.mark.parametrize(
    ("settings", "saved", "bf16", "reason"),
    [
        ({"opt_level": "O0", "fp8_gain_cache": None}, SAVED, (), "precision bf16"),
        ({"bf16_linears": ["linear_fc2", "linear_qkv"]}, SAVED, ("linear_qkv", "linear_fc2"), "by --bf16-linears"),
        ({"bf16_linears": []}, SAVED, (), "by --bf16-linears"),
        ({"fp8_min_gain": 0.0}, SAVED, (), "--fp8-min-gain 0"),
        ({}, SAVED, ("linear_fc1",), "as in the checkpoint"),
        ({}, PrecisionConfig(opt_level="O3"), (), "as in the checkpoint"),
    ],
)
def test_what_goes_before_a_measurement(
    tmp_path: Path, settings: dict[str, Any], saved: PrecisionConfig, bf16: tuple[str, ...], reason: str
):
    assert choose(config(tmp_path, **settings), refuse, saved) == Fp8LayerChoice(bf16, reason)
    assert list(tmp_path.iterdir()) == []


def test_without_fp8_hardware_all_are_fp8_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert choose(config(tmp_path), None) == Fp8LayerChoice((), "not measured: this hardware has no FP8, which is emulated")
    monkeypatch.setattr(fp8_layers, "has_fp8", lambda: True)
    assert choose(config(tmp_path), None) == Fp8LayerChoice((), "not measured on this GPU")
    assert fp8_layers.default_measure() is fp8_layers.measure


# The table


def test_a_shape_is_measured_once_a_machine(tmp_path: Path):
    table = Table()
    settings = config(tmp_path)
    first = choose(settings, table)
    assert len(table.asked) == 4
    assert choose(settings, refuse) == first
    choose(dataclasses.replace(settings, training=dataclasses.replace(settings.training, micro_batch_size=8)), table)
    assert {shape.tokens for shape in table.asked[4:]} == {128}
    choose(config(tmp_path, opt_level="O1"), refuse)  # stores the weight as O2 does
    choose(config(tmp_path, opt_level="O3"), table)
    assert len(table.asked) == 12
    keys = json.loads((tmp_path / "gain.json").read_text())
    assert len(keys) == 12
    for fp8_recipe in ("tensorwise", "blockwise", "blockwise-power-of-two"):  # the last two and the first share a scaling rule or a block
        choose(config(tmp_path, fp8_recipe=fp8_recipe), table)
    assert len(table.asked) == 24
    assert all(f"cpu, torch {torch.__version__}, weight " in key for key in keys) or torch.cuda.is_available()


# Runs


def hardware(monkeypatch: pytest.MonkeyPatch, table: Measure) -> None:
    monkeypatch.setattr(fp8_layers, "default_measure", lambda: table)


@pytest.mark.parametrize("level", ["O3", *(pytest.param(level, marks=pytest.mark.nightly) for level in ("O1", "O2"))])
def test_a_model_of_both_kinds_learns_and_resumes_bit_for_bit(prefix: Path, tmp_path: Path, level: str):
    settings = {"opt_level": level, "bf16_linears": SOME, "train_iters": 12, "save": str(tmp_path / "straight")}
    straight = tiny.losses(tiny.run(tiny.config(prefix, **settings)))
    assert straight[-1] < straight[0] - 0.2
    saved = str(tmp_path / "saved")
    first = tiny.losses(tiny.run(tiny.config(prefix, **settings | {"exit_interval": 6, "save": saved})))
    resumed = tiny.losses(tiny.run(tiny.config(prefix, opt_level=level, train_iters=12, load=saved, fp8_min_gain=1.0)))
    assert first + resumed == straight


@pytest.mark.parametrize("exchange", ["nccl", pytest.param("fp32-sum", marks=pytest.mark.nightly)])
def test_all_linear_layers_in_bf16_are_o0_s_with_other_states(prefix: Path, exchange: str):
    """The first loss is that of the same forward; nothing wants an FP8 gradient to be there."""
    rows = {
        name: tiny.losses(tiny.run(tiny.config(prefix, train_iters=6, **settings)))
        for name, settings in (
            ("O0", {"opt_level": "O0"}),
            ("O2", {"opt_level": "O2", "bf16_linears": list(LINEARS), "grad_exchange": exchange, "grad_accum_dtype": "fp8"}),
        )
    }
    assert rows["O2"][0] == rows["O0"][0]
    assert rows["O2"] == pytest.approx(rows["O0"], rel=0.01)


def test_the_measured_choice_is_told_kept_and_taken_over(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    saved, cache = str(tmp_path / "saved"), str(tmp_path / "gain.json")
    hardware(monkeypatch, Table())
    measured = {"opt_level": "O2", "fp8_min_gain": 1.5, "fp8_gain_cache": cache}
    rows = tiny.run(tiny.config(prefix, train_iters=4, exit_interval=2, save=saved, **measured))
    said = "linear layers: 0 FP8, 8 BF16 (gain 1.33); measured, --fp8-min-gain 1.5"
    assert said in capsys.readouterr().out
    (row,) = [row for row in rows if row["kind"] == "precision"]
    gains = dict.fromkeys(LINEARS, 20 / 15)
    assert row["linears"] == {"layers": 8, "bf16": list(LINEARS), "gain": gains, "reason": "measured, --fp8-min-gain 1.5"}

    # On another machine all would be FP8.
    hardware(monkeypatch, refuse)
    tiny.run(tiny.config(prefix, opt_level="O2", train_iters=4, load=saved, fp8_min_gain=1.0))
    assert "linear layers: 0 FP8, 8 BF16 (" in (out := capsys.readouterr().out)
    assert "; as in the checkpoint" in out
    for other in ({"fp8_min_gain": 0.0}, {"bf16_linears": ["linear_qkv"]}):
        tiny.run(tiny.config(prefix, opt_level="O2", train_iters=4, load=saved, **other))
        assert "converted: linear layers in BF16 linear_qkv linear_proj linear_fc1 linear_fc2 -> " in capsys.readouterr().out
    tiny.run(tiny.config(prefix, opt_level="O2", train_iters=2, load=saved, finetune=True))  # the weights fit both


@pytest.mark.gpu
def test_a_measurement_times_both_precisions_and_leaves_nothing_behind():
    state, before = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    recipe = tiny.config("unread", opt_level="O3").precision.recipe
    times = fp8_layers.measure(Shape(8192, 4096, 4096), recipe)
    assert min(times.bf16, times.fp8) > 6 * 8192 * 4096**2 / 10e15  # seconds; no card has 10 PFLOP/s, and a busy one may take any time
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() - before < 64 * 2**20
