"""--attention-precision fp8 in whole runs: the loss it costs, at every level, over tensor-parallel processes, and a resumed run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import dist, tiny
from megatron.lm.config import Config

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
@pytest.mark.parametrize("precision", ["O1", "O2", "coat"])
def test_at_the_other_levels(tmp_path: Path, precision: str):
    run = {way: settings(tmp_path, precision=precision, train_iters=30, attention_precision=way) for way in ("fp8", "bf16")}
    narrow, wide = (tiny.losses(tiny.run(run[way])) for way in ("fp8", "bf16"))
    assert 0 < difference(narrow, wide) < LOSS


@pytest.mark.nightly
@pytest.mark.parametrize("more", [{"bf16_linears": ("linear_proj",), "qk_layernorm": True}, {"hidden_dropout": 0.1}], ids=str)
def test_in_layers_that_are_not_fused(tmp_path: Path, more: dict[str, Any]):
    run = {way: settings(tmp_path, train_iters=20, attention_precision=way, **more) for way in ("fp8", "bf16")}
    narrow, wide = (tiny.losses(tiny.run(run[way])) for way in ("fp8", "bf16"))
    assert 0 < difference(narrow, wide) < LOSS


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
