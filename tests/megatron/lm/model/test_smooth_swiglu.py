"""`--smooth-swiglu` in the trainer: scales per channel in fused and unfused layers, saved, resumed, split, and refused where they have no
effect. `--fp8-margin 8` makes room, so that every channel of the tiny model is raised."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import checkpoints, dist, tiny
from helpers.checkpoints import tensors
from megatron.lm.checkpoint import latest

SMOOTH: dict[str, Any] = {"swiglu": True, "opt_level": "O2", "fp8_margin": 8, "smooth_swiglu": True, "train_iters": tiny.BOTH_PHASES}
PLAIN = SMOOTH | {"smooth_swiglu": False}
KEY = "model/decoder.layers.0.mlp.linear_fc2.scaling.channels"


def scales(model: torch.nn.Module) -> list[torch.Tensor]:
    return [layer.mlp.linear_fc2.scaling.channels.scale.clone() for layer in model.decoder.layers]


@pytest.mark.parametrize(
    "changes", [{"opt_level": "O3"}, *(pytest.param(one, marks=pytest.mark.nightly(3)) for one in ({}, {"opt_level": "O1"}))], ids=str
)
def test_channels_are_raised_and_the_loss_is_that_without(prefix: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    with tiny.trainer(tiny.config(prefix, **SMOOTH | changes)) as made:
        layers = made.training.model.decoder.layers
        assert [layer.fused for layer in layers] == [True, True]
        assert all(layer.self_attention.linear_proj.scaling.channels is None for layer in layers)
        made.run()
        assert all(float(scale.min()) >= 4 for scale in scales(made.training.model))
    assert "linear layers: 8 FP8, 0 BF16; Smooth-SwiGLU; " in " ".join(capsys.readouterr().out.split())
    smooth, plain = (tiny.losses(tiny.run(tiny.config(prefix, **one | changes))) for one in (SMOOTH, PLAIN))
    assert smooth[: tiny.WINDOW] == plain[: tiny.WINDOW], "just-in-time scales have no channel scales"
    assert smooth == pytest.approx(plain, rel=2e-3)


@pytest.mark.parametrize("level", ["O3", pytest.param("O2", marks=pytest.mark.nightly(4))])
def test_a_resume_keeps_every_bit(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str):
    settings = SMOOTH | {"opt_level": level, "eval_interval": 2, "eval_iters": 1}
    straight = checkpoints.trained(tiny.config(prefix, **settings))
    checkpoints.trained(tiny.config(prefix, **settings, exit_interval=4, save=str(tmp_path)))
    resumed = checkpoints.trained(tiny.config(prefix, **settings, load=str(tmp_path)))
    assert resumed[0] == straight[0][4:]
    assert tiny.same(resumed[1], straight[1])
    held = tensors(latest(tmp_path))
    assert float(held[f"{KEY}.scale"].min()) >= 4
    capsys.readouterr()
    checkpoints.trained(tiny.config(prefix, **settings | {"smooth_swiglu": False}, load=str(tmp_path)))
    assert "Smooth-SwiGLU on -> off; all weights and states kept their bits" in capsys.readouterr().out


def test_it_can_be_switched_on_and_a_damaged_state_is_refused(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = checkpoints.saved(prefix, tmp_path / "plain", **PLAIN | {"train_iters": 4})
    with tiny.trainer(tiny.config(prefix, **SMOOTH, load=str(root))) as made:
        assert made.training.model.decoder.layers[0].mlp.linear_fc2.scaling.delayed, "the histories are kept"
        assert all(bool((scale == 1).all()) for scale in scales(made.training.model))
        made.run()
        assert all(float(scale.min()) >= 4 for scale in scales(made.training.model))
    assert "Smooth-SwiGLU off -> on" in capsys.readouterr().out
    root = checkpoints.saved(prefix, tmp_path / "smooth", **SMOOTH)
    width = tensors(latest(root))[f"{KEY}.scale"].shape[0]
    checkpoints.rewrite(latest(root), {f"{KEY}.scale": torch.full((width,), 3.0)})
    with pytest.raises(ValueError, match=r"linear_fc2\.scaling\.channels\.scale contains 3; it must be a power of two"):
        tiny.run(tiny.config(prefix, **SMOOTH, load=str(root)))


def on_two(prefix: str, folder: str) -> tuple[Any, ...]:
    settings = SMOOTH | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    straight = checkpoints.trained(tiny.config(prefix, **settings, save=folder, save_interval=4))
    resumed = checkpoints.trained(tiny.config(prefix, **settings, load=folder, ckpt_step=4))
    with tiny.trainer(tiny.config(prefix, **settings, load=folder)) as made:
        return straight, resumed, scales(made.training.model)


def test_tensor_parallel_ranks_have_the_scales_of_their_channels(gloo_prefix: Path, tmp_path: Path):
    alone = tiny.losses(tiny.run(tiny.config(gloo_prefix, **SMOOTH)))
    ranks = dist.run(on_two, 2, str(gloo_prefix), str(tmp_path))
    whole = tensors(latest(tmp_path))[f"{KEY}.scale"]
    assert whole.equal(torch.cat([own[0] for _, _, own in ranks])), "split as the weight's columns are"
    for straight, resumed, _ in ranks:
        assert resumed[0] == straight[0][4:]
        assert tiny.same(resumed[1], straight[1])
    assert next(straight[0] for straight, _, _ in ranks if straight[0]) == pytest.approx(alone, rel=0.02)
    with tiny.trainer(tiny.config(gloo_prefix, **SMOOTH, load=str(tmp_path))) as made:
        assert scales(made.training.model)[0].equal(whole), "one process takes those of both"
