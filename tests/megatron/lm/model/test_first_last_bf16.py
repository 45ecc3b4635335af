"""`--first-last-layers-bf16`: the first and last layers as at O0, the others in FP8, on any grid, saved, resumed, recorded and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import checkpoints, dist, tiny
from helpers.checkpoints import tensors
from megatron.lm.checkpoint import latest
from megatron.lm.checkpoint.files.folder import read_info
from megatron.lm.model.linear import FP8Gemm
from msamp.numerics.tensor import ScalingTensor

FOUR: dict[str, Any] = {"num_layers": 4, "train_iters": 4, "micro_batch_size": 2, "global_batch_size": 4, "opt_level": "O2"}
ENDS: dict[str, Any] = FOUR | {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2}


def linears(model: torch.nn.Module, layer: int) -> list[torch.nn.Module]:
    block = model.decoder.layers[layer]
    return [block.self_attention.linear_qkv, block.self_attention.linear_proj, block.mlp.linear_fc1, block.mlp.linear_fc2]


def test_the_layers_at_the_ends_have_no_fp8_and_the_others_stay_fused(prefix: Path, capsys: pytest.CaptureFixture[str]):
    with tiny.trainer(tiny.config(prefix, **ENDS)) as made:
        model = made.training.model
        in_fp8 = [[isinstance(linear, FP8Gemm) for linear in linears(model, layer)] for layer in range(4)]
        assert in_fp8 == [[False] * 4, [True] * 4, [False] * 4, [False] * 4]
        assert [layer.fused for layer in model.decoder.layers] == [False, True, False, False]
        assert [isinstance(linears(model, layer)[0].weight, ScalingTensor) for layer in range(4)] == [False, True, False, False]
        made.run()
    said = " ".join(capsys.readouterr().out.split())
    assert "linear layers: 4 FP8, 12 BF16 (layers 1, 3, 4 as a whole)" in said


def test_what_the_ends_compute_is_o0(prefix: Path):
    """All FP8 differs from the run, and the run from O0; with no FP8 layer left nothing could."""
    runs = [tiny.losses(tiny.run(tiny.config(prefix, **settings))) for settings in (FOUR, ENDS, FOUR | {"opt_level": "O0"})]
    assert len({tuple(losses) for losses in runs}) == 3
    assert all(losses[-1] < losses[0] for losses in runs)


@pytest.mark.parametrize("level", ["O2", *(pytest.param(level, marks=pytest.mark.nightly(4)) for level in ("O3", "coat"))])
def test_a_resume_keeps_every_bit_and_the_checkpoint_says_which_layers(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str
):
    kind = {"precision": "coat", "opt_level": None} if level == "coat" else {"opt_level": level}
    settings = ENDS | kind | {"eval_interval": 2, "eval_iters": 1}
    straight = checkpoints.trained(tiny.config(prefix, **settings))
    checkpoints.trained(tiny.config(prefix, **settings, exit_interval=2, save=str(tmp_path)))
    resumed = checkpoints.trained(tiny.config(prefix, **settings, load=str(tmp_path)))
    assert resumed[0] == straight[0][2:]
    assert tiny.same(resumed[1], straight[1])
    assert read_info(latest(tmp_path))["config"]["precision"]["num_layers_at_end_in_bf16"] == 2
    held = tensors(latest(tmp_path))
    assert [held[f"model/decoder.layers.{layer}.mlp.linear_fc1.weight"].dtype == torch.bfloat16 for layer in range(4)] == [
        *(True, False, True, True)
    ]
    capsys.readouterr()
    without = {name: value for name, value in settings.items() if "bf16" not in name}
    checkpoints.trained(tiny.config(prefix, **without, load=str(tmp_path)))
    assert "the checkpoint was converted: layers in BF16 1, 3, 4 -> none; " in capsys.readouterr().out


GRIDS: dict[str, dict[str, Any]] = {
    "data": {"micro_batch_size": 1},
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "opt_level": "O3"},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "interleaved": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
}


def on_grids(prefix: str, folder: str, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        settings, saved = ENDS | GRIDS[name], f"{folder}/{name}"
        straight = checkpoints.trained(tiny.config(prefix, **settings, save=saved, save_interval=2))
        resumed = checkpoints.trained(tiny.config(prefix, **settings, load=saved, ckpt_step=2))
        found[name] = straight, resumed
    return found


@pytest.mark.parametrize("names", [["pipeline"], pytest.param(["data", "tensor", "interleaved"], marks=pytest.mark.nightly(30))])
def test_two_processes_have_the_layers_of_one(gloo_prefix: Path, tmp_path: Path, names: list[str]):
    alone = tiny.losses(tiny.run(tiny.config(gloo_prefix, **ENDS)))
    ranks = dist.run(on_grids, 2, str(gloo_prefix), str(tmp_path), names)
    for name in names:
        losses = [rank[name][0][0] for rank in ranks if rank[name][0][0]]
        assert losses[0] == pytest.approx(alone, rel=0.02)
        for rank in ranks:
            straight, resumed = rank[name]
            assert resumed[0] == straight[0][2:]
            assert tiny.same(resumed[1], straight[1])
        held = tensors(latest(tmp_path / name))
        in_bf16 = [held[f"model/decoder.layers.{layer}.mlp.linear_fc1.weight"].dtype == torch.bfloat16 for layer in range(4)]
        assert in_bf16 == [True, False, True, True]
