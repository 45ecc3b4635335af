"""The layers of a peer's recipe, by a provider that stands in for Transformer Engine's: same modules and names, computed by torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from helpers import tiny
from megatron.lm import checkpoint
from megatron.lm.config import Config
from megatron.lm.config.sections import baselines
from megatron.lm.config.sections.baselines import PeerRecipe
from megatron.lm.model import gpt, peer
from megatron.lm.model.attention import SDPAttention
from megatron.lm.model.gpt import transformer_config
from megatron.lm.model.linear import layer_linears
from megatron.lm.model.norm import LayerNorm, RMSNorm
from msamp.numerics.recipe import BF16


class NormColumn(layer_linears(BF16)["linear_fc1"]):  # type: ignore[misc]
    """Norm and linear layer in one, with the names that Transformer Engine's has."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        self.layer_norm_weight = nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))
        self.layer_norm_bias = nn.Parameter(torch.zeros(config.hidden_size, dtype=config.params_dtype))

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        shape, epsilon = self.layer_norm_weight.shape, self.config.layernorm_epsilon
        normed = functional.layer_norm(input_, shape, self.layer_norm_weight, self.layer_norm_bias, epsilon)
        return super().forward(normed, *args, **kwargs)


class Provider(LocalSpecProvider):
    """Answers as megatron-core's TESpecProvider does."""

    def row_parallel_linear(self) -> type:
        return layer_linears(BF16)["linear_fc2"]

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumn

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RMSNorm if rms_norm else LayerNorm

    def core_attention(self) -> type:
        return SDPAttention


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine is there. Without its fusions, which want its kernels and a compiler."""
    monkeypatch.setattr(baselines, "installed", lambda: True)
    monkeypatch.setattr(gpt, "check_available", lambda recipe: None)
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", Provider, raising=False)
    monkeypatch.setattr(peer, "fusions", lambda model: {})


def recipe_of(settings: Config) -> PeerRecipe:
    found = settings.precision.recipe
    assert isinstance(found, PeerRecipe)
    return found


@pytest.mark.promise("Baselines", "A `te-*` recipe sets its own megatron-core options and fusions, and nothing else.")
@pytest.mark.parametrize("name", baselines.BASELINES)
def test_megatron_core_is_told_what_the_recipe_says(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer, "fusions", lambda model: {})
    settings = tiny.config("corpus", precision=name)
    recipe = recipe_of(settings)
    sections = (settings.model, settings.parallel, settings.training)
    told, plain = transformer_config(*sections, recipe), transformer_config(*sections, BF16)
    core = dict(recipe.core)
    assert {key: getattr(told, key) for key in core} == core
    untouched = vars(plain).keys() - core.keys() - {"init_method", "output_layer_init_method", "embedding_init_method"}
    assert {key: vars(told)[key] for key in untouched} == {key: vars(plain)[key] for key in untouched}
    assert plain.fp8 is None


@pytest.mark.promise("Baselines", "With layers that compute what O0's do, a `te-*` run has O0's losses to the bit.")
def test_a_run_of_theirs_is_a_run_of_ours_but_for_the_layers(prefix: Path, fake: None):
    """The layers that stand in compute what O0's do, but rotate in BF16: data, seed, schedule, gradients and update are the same."""
    runs = {name: tiny.losses(tiny.run(tiny.config(prefix, precision=name, train_iters=4))) for name in ("bf16", "te-bf16")}
    assert len(runs["bf16"]) == 4
    assert runs["te-bf16"] == pytest.approx(runs["bf16"], rel=1e-4)


def test_saved_and_resumed(prefix: Path, tmp_path: Path, fake: None):
    whole = tiny.losses(tiny.run(tiny.config(prefix, precision="te-current", train_iters=4)))
    again = {"precision": "te-current", "train_iters": 4, "save": str(tmp_path), "load": str(tmp_path)}
    first = tiny.losses(tiny.run(tiny.config(prefix, **again, exit_interval=2)))
    assert checkpoint.exists(tmp_path)
    assert first + tiny.losses(tiny.run(tiny.config(prefix, **again))) == whole


def test_a_checkpoint_of_our_layers_is_refused_by_name(prefix: Path, tmp_path: Path, fake: None):
    tiny.run(tiny.config(prefix, precision="bf16", train_iters=2, save=str(tmp_path)))
    with pytest.raises(ValueError, match=r"layer_norm_weight|input_layernorm"):
        tiny.run(tiny.config(prefix, precision="te-bf16", train_iters=4, load=str(tmp_path)))


# Refusals at the start


@pytest.mark.promise("Baselines", "Without Transformer Engine a `te-*` recipe is refused by name.")
def test_without_the_package_or_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    recipe = recipe_of(tiny.config("corpus", precision="te-block"))
    monkeypatch.setattr(peer, "installed", lambda: False)
    with pytest.raises(
        ValueError, match=r"precision te-block requires Transformer Engine, which is not installed: run `pip install -e '\.\[peers\]'`"
    ):
        peer.check_available(recipe)
    monkeypatch.setattr(peer, "installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="requires an NVIDIA GPU, and this machine has none; use --precision bf16"):
        peer.check_available(recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("name", baselines.BASELINES)
def test_transformer_engine_itself_trains(name: str, prefix: Path):
    pytest.importorskip("transformer_engine.pytorch", reason="pip install -e '.[peers]'")
    wide = {"hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "micro_batch_size": 4}
    losses = {one: tiny.losses(tiny.run(tiny.config(prefix, precision=one, train_iters=10, **wide))) for one in ("bf16", name)}
    assert losses[name][-1] < losses[name][0]
    # The same weights, data and seed; then FP8's errors add up on a toy at this learning rate (te-current on an H200: 12 % at step 9).
    assert losses[name][0] == pytest.approx(losses["bf16"][0], rel=0.01)
    assert losses[name][:6] == pytest.approx(losses["bf16"][:6], rel=0.05)
