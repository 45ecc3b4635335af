"""Mixtures of experts in whole runs: they learn, resume bit for bit, on another grid too, and are refused where they are not built."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import dist, tiny
from megatron.lm.config import Config

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
    "swiglu": True,
    "disable_bias_linear": True,
    "global_batch_size": 8,
}


def settings(folder: Path, level: str = "O0", **changes: Any) -> Config:
    data = folder / "corpus" if (folder / "corpus.bin").exists() else tiny.write_data(folder)
    return tiny.config(data, **EXPERTS | {"opt_level": level} | changes)


def continued(run: Config, folder: Path, **training: Any) -> Config:
    return replace(run, training=replace(run.training, **training), checkpoint=replace(run.checkpoint, load=str(folder)))


def test_it_learns_logs_its_load_and_resumes_bit_for_bit(tmp_path: Path):
    changes = {"train_iters": 30, "eval_interval": 2, "eval_iters": 1, "moe_layer_freq": "[0,1]"}
    record = {"record_precision": str(tmp_path / "record.jsonl"), "record_interval": 10}
    rows = [row for row in tiny.run(settings(tmp_path, **changes, **record)) if row["kind"] == "train"]
    whole = tiny.losses(rows)
    assert sum(whole[-5:]) / 5 < sum(whole[:5]) / 5 - 0.3
    assert 0.9 < rows[-1]["moe_aux_loss"] < 2
    assert rows[-1]["moe_z_loss"] > 0
    assert 0 <= rows[-1]["moe_load_min"] < 1 < rows[-1]["moe_load_max"] <= 2  # an expert has at most every token, top 2 of 4
    recorded = json.loads((tmp_path / "record.jsonl").read_text().splitlines()[-1])["experts"]
    assert list(recorded) == ["1"]
    assert sum(recorded["1"]["load"]) == pytest.approx(1, rel=1e-4)
    run = settings(tmp_path, **changes, save=str(tmp_path / "saved"), exit_interval=3)
    first = tiny.losses(tiny.run(run))
    assert first + tiny.losses(tiny.run(continued(run, tmp_path / "saved", exit_interval=6))) == whole[:6]


@pytest.mark.parametrize("level", ["O2", *(pytest.param(level, marks=pytest.mark.nightly(8)) for level in ("O1", "O3"))])
def test_fp8_experts_learn_as_bf16_ones_and_resume_bit_for_bit(tmp_path: Path, level: str):
    changes = {"train_iters": 14, "moe_layer_freq": "[0,1]"}
    record = {"record_precision": str(tmp_path / "record.jsonl"), "record_interval": 8}
    run = settings(tmp_path, level, **changes, save=str(tmp_path / "saved"))
    whole = tiny.losses(tiny.run(replace(run, logging=replace(run.logging, **record), checkpoint=replace(run.checkpoint, save=None))))
    plain = tiny.losses(tiny.run(settings(tmp_path, **changes)))
    assert whole == pytest.approx(plain, abs=0.03)
    row = json.loads((tmp_path / "record.jsonl").read_text().splitlines()[-1])
    casts, sums = row["casts"], row["sums"]["decoder.layers.1.mlp.experts.fc2_weight"]
    assert sums.keys() == {"output", "grad_input", "grad_weight"}
    assert all(0.999 < slope < 1.001 and sqnr > 40 for slope, sqnr in sums.values())
    assert casts["decoder.layers.1.mlp.experts.fc2_weight"].keys() == {"input", "grad_output"}
    assert casts["decoder.layers.1.mlp.experts.fc2_weight.3"].keys() >= {"grad"}
    first = tiny.losses(tiny.run(replace(run, training=replace(run.training, exit_interval=6))))
    assert first + tiny.losses(tiny.run(continued(run, tmp_path / "saved", exit_interval=9))) == whole[:9]
    elsewhere = settings(tmp_path, **changes, load=str(tmp_path / "saved"), exit_interval=12)
    assert tiny.losses(tiny.run(elsewhere))[:3] == pytest.approx(whole[9:12], abs=0.03)  # experts of FP8 resume as one BF16 tensor


def resumed(data: str, load: str, level: str, changes: dict[str, Any]) -> list[float]:
    return tiny.losses(tiny.run(tiny.config(data, **EXPERTS, opt_level=level, load=load, **changes)))


GRIDS = {
    "stages": {"pipeline_model_parallel_size": 2},
    "zero": {"use_distributed_optimizer": True},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1},
}


@pytest.mark.nightly(20)
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_run_goes_on_on_another_grid(tmp_path: Path, grid: str, level: str):
    changes = {name: value for name, value in GRIDS[grid].items() if level == "O0" or name != "sequence_parallel"}
    tiny.run(settings(tmp_path, level, save=str(tmp_path / "saved"), exit_interval=3))
    where = str(tmp_path / "corpus"), str(tmp_path / "saved"), level
    alone = resumed(*where, {})
    losses = dist.run(resumed, 2, *where, changes, init=False)[0]
    assert losses == pytest.approx(alone, abs=0.02)
