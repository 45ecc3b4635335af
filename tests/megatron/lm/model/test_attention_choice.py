"""--attention-precision auto: what goes before a measurement, what is measured, and that a resume keeps the choice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import tiny
from megatron.lm.config import Config
from megatron.lm.config.rules.precision import attention_refusal
from megatron.lm.model import fp8_layers
from megatron.lm.model.fp8_layers import AttentionShape, Measure, Times
from msamp.numerics.recipe import Recipe

ATTENTION = {"attention_precision": "auto", "kv_channels": 128, "micro_batch_size": 2}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tiny.write_data(tmp_path)


def config(folder: Path, **settings: Any) -> Config:
    return tiny.config("unread", **{"opt_level": "O2", "fp8_min_gain": 1.0, "fp8_gain_cache": str(folder / "gain.json"), **settings})


def refuse(*_: Any) -> Any:
    raise AssertionError("nothing was to be measured, and no checkpoint to be read")


def attention_times(fp8: float) -> Measure:
    def asked(shape: Any, recipe: Recipe) -> Times:
        return Times(1.0, fp8) if isinstance(shape, AttentionShape) else Times(2.0, 1.0)

    return asked


@pytest.mark.parametrize(
    ("settings", "saved", "chosen", "reason"),
    [
        ({}, None, "fp8", "gain 1.25, --fp8-min-gain 1"),
        ({"fp8_min_gain": 1.3}, None, "bf16", "gain 1.25, --fp8-min-gain 1.3"),
        ({"fp8_min_gain": 0.0}, None, "fp8", "--fp8-min-gain 0"),
        ({"opt_level": "O0"}, None, "bf16", "precision bf16"),
        ({"deterministic": True}, None, "bf16", "--deterministic "),
        ({"attention_dropout": 0.1}, None, "bf16", "--attention-precision fp8 does not go with --attention-dropout 0.1"),
        ({"reset_attention_mask": True}, None, "bf16", "--reset-attention-mask "),
        ({"context_parallel_size": 2, "cp_wire": "bf16"}, None, "bf16", "--cp-wire bf16 does not go with --attention-precision fp8"),
        ({}, "fp8", "fp8", "as in the checkpoint"),
        ({"fp8_min_gain": 1.3}, "bf16", "bf16", "as in the checkpoint"),
        ({"fp8_min_gain": 0.0}, "bf16", "fp8", "--fp8-min-gain 0"),
    ],
)
def test_attention_is_fp8_where_it_is_faster_and_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], saved: str | None, chosen: str, reason: str
):
    monkeypatch.setattr(fp8_layers, "has_fp8", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "card")
    made = config(tmp_path, **ATTENTION | settings)
    before = saved and replace(made.precision, attention_precision=saved)
    decided, choice = fp8_layers.decide(*tiny.parts(made), attention_times(0.8), lambda: before or None, attention_refusal(made))
    assert decided.attention_precision == chosen
    assert choice.attention.startswith(f"attention: {chosen.upper()}; {reason}")


def test_attention_is_measured_once_a_machine_and_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = config(tmp_path, **ATTENTION)

    def choose(measure: Any, micro_batch_size: int = 2) -> tuple[str, str]:
        return fp8_layers.choose_attention(made.model, made.parallel, made.precision, micro_batch_size, measure)

    assert choose(None) == ("bf16", "not measured: this hardware has no FP8, which is emulated")
    monkeypatch.setattr(fp8_layers, "has_fp8", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "card")
    assert choose(None) == ("bf16", "not measured on this GPU")
    assert choose(attention_times(1.25)) == ("bf16", "gain 0.80, --fp8-min-gain 1")
    assert choose(refuse) == ("bf16", "gain 0.80, --fp8-min-gain 1")
    with pytest.raises(AssertionError, match="nothing was to be measured"):
        choose(refuse, 3)


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({}, (2, 16, 2, 2, 128)),
        ({"tensor_model_parallel_size": 2}, (2, 16, 1, 1, 128)),
        ({"context_parallel_size": 2}, (2, 8, 2, 2, 128)),
        ({"context_parallel_size": 2, "cp_comm_type": "a2a"}, (2, 16, 1, 1, 128)),
        ({"group_query_attention": True, "num_query_groups": 1}, (2, 16, 2, 1, 128)),
    ],
)
def test_the_shape_of_attention_is_that_of_a_rank(tmp_path: Path, settings: dict[str, Any], shape: tuple[int, ...]):
    made = config(tmp_path, **ATTENTION | {"seq_length": 16, "num_attention_heads": 2} | settings)
    assert fp8_layers.attention_shape(made.model, made.parallel, made.training.micro_batch_size) == shape


def test_a_run_says_what_attention_it_chose_and_a_resume_keeps_it(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    saved = str(tmp_path / "saved")
    run = {"opt_level": "O3", "train_iters": 4, "fp8_min_gain": 1.0, "fp8_gain_cache": str(tmp_path / "gain.json"), **ATTENTION}
    with monkeypatch.context() as patch:
        patch.setattr(fp8_layers, "has_fp8", lambda: True)
        patch.setattr(torch.cuda, "get_device_name", lambda *_: "card")
        patch.setattr(fp8_layers, "default_measure", lambda: attention_times(0.5))
        first = tiny.losses(tiny.run(tiny.config(prefix, exit_interval=2, save=saved, **run)))
    assert "attention: FP8; gain 2.00, --fp8-min-gain 1" in capsys.readouterr().out
    rest = tiny.losses(tiny.run(tiny.config(prefix, load=saved, **run)))
    assert "attention: FP8; as in the checkpoint" in capsys.readouterr().out
    assert first + rest == tiny.losses(
        tiny.run(tiny.config(prefix, **run | {"attention_precision": "fp8", "fp8_min_gain": 0.0, "fp8_gain_cache": None}))
    )


@pytest.mark.gpu
def test_attention_is_measured_on_a_gpu_and_leaves_nothing_behind():
    pytest.importorskip("cudnn")
    state, before = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    times = fp8_layers.measure(AttentionShape(1, 8192, 32, 8, 128), tiny.config("unread", opt_level="O3").precision.recipe)
    flops = 7 * 8192**2 * 128 * 32  # no faster than tensor cores can be; how much slower is up to who else uses the GPU
    assert times.bf16 > flops / 1e15
    assert times.fp8 > flops / 2e15
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() - before < 64 * 2**20
