"""--fp8-fast-accumulation in whole runs: which products it reaches, that the loss stays, and what the precision record shows."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from megatron.lm.run.reports import recorder as recorder_module
from megatron.lm.run.reports.recorder import summary
from msamp.kernels import ops
from msamp.numerics.accumulation import accumulating

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def sums_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[list[bool], list[float]]:
    """How each FP8 product of a run was to be added up, and the losses."""
    told: list[bool] = []
    real = ops.scaled_mm
    with monkeypatch.context() as patched:
        patched.setattr(ops, "scaled_mm", lambda *a, fast_accum: (told.append(fast_accum), real(*a, fast_accum=fast_accum))[1])
        losses = tiny.losses(tiny.run(tiny.config(tiny.write_data(tmp_path), train_iters=3, **settings)))
    return told, losses


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "coat"])
def test_every_product_of_a_linear_layer_is_fast(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full, losses = sums_of(tmp_path, monkeypatch, precision=level)
    fast, same = sums_of(tmp_path, monkeypatch, precision=level, fp8_fast_accumulation="all")
    assert len(full) == len(fast) > 0
    assert full.count(True) < full.count(False)
    assert all(fast)
    assert same == losses  # a CPU adds up in full


def test_no_product_is_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told, _ = sums_of(tmp_path, monkeypatch, precision="O3", fp8_fast_accumulation="none", output_layer_precision="fp8-all")
    assert len(told) > 0
    assert not any(told)


def test_the_head_s_products_are_added_up_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told, _ = sums_of(tmp_path, monkeypatch, precision="O3", fp8_fast_accumulation="all", output_layer_precision="fp8-all")
    assert 0 < told.count(False) < told.count(True)


@pytest.mark.parametrize("unfused", [{}, {"hidden_dropout": 0.1}], ids=["fused", "unfused"])
def test_sums_of_products_are_compared_with_exact_ones(unfused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    file = tmp_path / "p.jsonl"
    monkeypatch.setattr(recorder_module, "SHRUNK", 2.0)
    with accumulating("hopper"):
        tiny.run(
            tiny.config(tiny.write_data(tmp_path), precision="O3", train_iters=2, record_precision=str(file), record_interval=1, **unfused)
        )
    rows = [json.loads(text) for text in file.read_text().splitlines()]
    linears = [f"decoder.layers.{i}.{name}" for i in range(2) for name in LINEARS]
    for row in rows:
        assert sorted(row["sums"]) == sorted(linears)
        for products in row["sums"].values():
            assert set(products) == {"output", "grad_input", "grad_weight"}
            assert all(0.999 < slope < 1.001 and sqnr > 40 for slope, sqnr in products.values())
    assert summary(rows[-1])["mlp.linear_fc1/output/slope_worst"] == min(
        rows[-1]["sums"][name]["output"][0] for name in linears if "fc1" in name
    )
    assert capsys.readouterr().out.count("--fp8-fast-accumulation none") == 1
