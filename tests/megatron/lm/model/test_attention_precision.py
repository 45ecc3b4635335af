"""--attention-precision fp8 in whole runs: the loss it costs, at every level, over tensor-parallel processes, and a resumed run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import dist, tiny
from megatron.lm.config import Config
from megatron.lm.run.reports import recorder as recorder_module
from megatron.lm.run.reports.recorder import summary
from msamp.kernels import ops
from msamp.numerics.accumulation import accumulating

LOSS = 0.05  # most by which a training loss of about 2 to 4 may differ over 30 steps


def settings(folder: Path, **changes: Any) -> Config:
    data = tiny.write_data(folder) if not (folder / "corpus.bin").exists() else folder / "corpus"
    changes = {"precision": "O3", "attention_precision": "fp8"} | changes
    return tiny.config(data, **changes)


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_a_tiny_gpt_trains_to_the_same_loss_and_resumes_bit_for_bit(tmp_path: Path):
    narrow, wide = (tiny.losses(tiny.run(settings(tmp_path, train_iters=18, attention_precision=way))) for way in ("fp8", "bf16"))
    assert narrow[-1] < narrow[0] - 0.3
    assert 0 < difference(narrow, wide) < LOSS
    run = settings(tmp_path, train_iters=18, save=str(tmp_path / "saved"), exit_interval=tiny.BOTH_PHASES)
    first = tiny.losses(tiny.run(run))
    later = replace(run.training, exit_interval=2 * tiny.BOTH_PHASES)
    resumed = replace(run, training=later, checkpoint=replace(run.checkpoint, load=str(tmp_path / "saved")))
    assert first + tiny.losses(tiny.run(resumed)) == narrow[: 2 * tiny.BOTH_PHASES]


def test_a_recomputed_run_of_several_micro_batches_has_the_same_losses(tmp_path: Path):
    run = settings(tmp_path, train_iters=tiny.BOTH_PHASES, global_batch_size=8, recompute_granularity="selective", bf16_linears=())
    kept = replace(run, training=replace(run.training, recompute_granularity=None))
    assert tiny.losses(tiny.run(run)) == tiny.losses(tiny.run(kept))


def test_a_run_may_go_on_with_the_other_attention(tmp_path: Path):
    for before, after in (("fp8", "bf16"), ("bf16", "fp8")):
        saved = str(tmp_path / before)
        tiny.run(settings(tmp_path, train_iters=6, attention_precision=before, save=saved, exit_interval=3))
        rows = tiny.run(settings(tmp_path, train_iters=6, attention_precision=after, load=saved))
        assert len(tiny.losses(rows)) == 3


@pytest.mark.nightly
@pytest.mark.parametrize(("precision", "spread"), [("O2", False), ("O3", True)], ids=["O2, TP", "O3, TP and SP"])
def test_under_tensor_parallelism(tmp_path: Path, precision: str, spread: bool):
    alone = tiny.losses(tiny.run(settings(tmp_path, precision=precision, train_iters=10)))
    grid = {"tensor_model_parallel_size": 2, "sequence_parallel": spread}
    split = tiny.losses(dist.run(tiny.run, 2, settings(tmp_path, precision=precision, train_iters=10, **grid))[0])
    assert difference(alone, split) < LOSS


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"bf16_linears": ("linear_proj",)}, {"recompute_granularity": "selective"}], ids=str)
def test_on_a_gpu_eager_and_captured(tmp_path: Path, more: dict[str, Any]):
    pytest.importorskip("cudnn")
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "seq_length": 32, "train_iters": 30, "lr": 1e-3, "min_lr": 1e-4}
    eager, captured, wide = (
        tiny.losses(tiny.run(settings(tmp_path, cuda_graph=graph, attention_precision=way, **sizes, **more)))
        for way, graph in (("fp8", "none"), ("fp8", "step"), ("bf16", "step"))
    )
    assert difference(eager, captured) < LOSS / 5  # backward adds up in any order
    assert 0 < difference(captured, wide) < LOSS


@pytest.mark.gpu
def test_on_hopper_another_width_of_heads_is_refused_by_name(tmp_path: Path):
    if torch.cuda.get_device_capability()[0] > 9:
        pytest.skip("after Hopper heads of 16 channels are served")
    with pytest.raises(
        ValueError, match=r"--attention-precision fp8: heads have .* channels; the backward of FP8 attention on Hopper requires 128"
    ):
        tiny.run(settings(tmp_path))


# --fp8-fast-accumulation in whole runs: which products it reaches, that the loss stays, and what the precision record shows.


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
