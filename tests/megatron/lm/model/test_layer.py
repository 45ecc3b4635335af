"""The fused layer against megatron-core's composition of the same modules, and when it steps aside for it."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist, tiny
from helpers.choices import each_once
from megatron.lm.model.gpt import GPT, build_model
from megatron.lm.model.layer import Layer
from megatron.lm.model.linear import FP8Gemm
from megatron.lm.processes import process_groups
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.recipe import FP32, O2, O3, Recipe

pytestmark = pytest.mark.usefixtures("one_process")

SHAPES: dict[str, dict[str, Any]] = {
    "rope": {"rotary_percent": 0.5},
    "learned": {"position_embedding_type": "learned_absolute"},
    "llama": {
        "swiglu": True,
        "normalization": "RMSNorm",
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    },
    "squared ReLU, bias of QKV, no positions": {
        "squared_relu": True,
        "disable_bias_linear": True,
        "add_qkv_bias": True,
        "position_embedding_type": "none",
    },
    "stretched, norms of heads with bias": {"use_rope_scaling": True, "rotary_base": 5e5, "qk_layernorm": True},
    "qk norm": {
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "swiglu": True,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "disable_bias_linear": True,
    },
}


def model(recipe: Recipe = O2, **settings: Any) -> GPT:
    process_groups.seed_all(7)
    return build_model(*tiny.parts(tiny.config("unread", hidden_size=64, init_method_std=0.1, **settings)), recipe, tiny.VOCABULARY)


def layers(made: GPT) -> list[Layer]:
    return [module for module in made.modules() if isinstance(module, Layer)]


def unfused(made: GPT) -> GPT:
    for layer in layers(made):
        layer.fused = False
    return made


def forward_backward(made: GPT) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of every token [b, s], and gradients by name."""
    tokens = torch.randint(0, tiny.VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0)).to(process_groups.device())
    losses = made(tokens, torch.arange(16, device=tokens.device).expand(4, 16), None, labels=tokens.roll(1, 1))
    losses.mean().backward()
    return losses.detach(), {name: p.grad for name, p in made.named_parameters()}


def assert_same_bits(a: tuple[Tensor, dict[str, Tensor]], b: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(a[0], b[0])
    assert a[1].keys() == b[1].keys()
    assert all(torch.equal(grad, b[1][name]) for name, grad in a[1].items())


@each_once(0.5, shape=tuple(SHAPES), recipe=[O2, O3])
def test_close_to_the_composition_of_the_same_modules(shape: str, recipe: Recipe):
    made = model(recipe, **SHAPES[shape])
    assert [layer.fused for layer in layers(made)] == [True, True]
    losses, gradients = forward_backward(made)
    expected_losses, expected = forward_backward(unfused(model(recipe, **SHAPES[shape])))
    torch.testing.assert_close(losses.mean(), expected_losses.mean(), rtol=0, atol=1e-2)
    assert gradients.keys() == expected.keys()
    assert {name: db for name in expected if (db := sqnr_db(expected[name].float(), gradients[name].float())) < 12} == {}


def test_fused_layers_hide_padding_as_the_composition_does():
    tokens = torch.randint(0, tiny.VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0)).to(process_groups.device())
    positions = torch.arange(16, device=tokens.device).expand(4, 16)
    attended = positions < torch.tensor([16, 12, 5, 1], device=tokens.device)[:, None]
    found = []
    for alter in (lambda made: made, unfused):
        made = alter(model(O2, objective="masked-lm"))
        hidden = made.hidden_states(tokens, positions, ~attended[:, None, None, :])
        direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden.device)
        (hidden.float() * direction * attended.t()[:, :, None]).sum().backward()
        seen = made.hidden_states(tokens, positions)  # the same without a mask
        found.append((hidden.detach()[attended.t()], {name: p.grad for name, p in made.named_parameters() if p.grad is not None}))
        assert sqnr_db(hidden.detach()[:5, 2].float(), seen.detach()[:5, 2].float()) < 20
    (fused, gradients), (expected, expected_gradients) = found
    assert sqnr_db(expected.float(), fused.float()) > 20
    assert gradients.keys() == expected_gradients.keys()
    assert {name: db for name, x in expected_gradients.items() if (db := sqnr_db(x.float(), gradients[name].float())) < 12} == {}


@pytest.mark.parametrize(
    "watched",
    [
        *("self_attention.linear_proj", "mlp.linear_fc1"),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("self_attention.linear_qkv", "mlp.linear_fc2")),
    ],
)
def test_a_watched_layer_is_not_fused(watched: str):
    made, calls = model(), []
    handles = [layer.get_submodule(watched).register_forward_hook(lambda *_: calls.append(watched)) for layer in layers(made)]
    assert_same_bits(forward_backward(made), forward_backward(unfused(model())))
    assert calls == [watched] * 2
    for handle in handles:
        handle.remove()
    made.zero_grad()
    assert_same_bits(forward_backward(made), forward_backward(model()))
    assert calls == [watched] * 2


WAYS: dict[str, dict[str, Any]] = {
    "sequence": {"sequence_parallel": True},
    "gathered": {"sequence_parallel": True, "tp_saved_input": "gathered"},
    "whole rows": {},
    "fp8 sums": {"sequence_parallel": True, "tp_wire": "fp8"},
}


def found_on_a_rank(
    recipe: Recipe, shape: str, way: str, fuse: bool, convert: bool = True, bias: float | None = None
) -> tuple[list[bool], Tensor, dict[str, Tensor]]:
    """Which layers are fused, the losses, and this rank's gradients; without `convert` through megatron-core's collectives. `bias`: of the
    row-parallel layers."""
    parallel = {"tensor_model_parallel_size": torch.distributed.get_world_size(), **WAYS[way]}
    settings = tiny.config("unread", hidden_size=64, init_method_std=0.1, **SHAPES[shape], **parallel)
    with tiny.started(settings):
        process_groups.seed_all(7)
        made = build_model(*tiny.parts(settings), recipe, tiny.VOCABULARY)
        fused = [layer.fused for layer in layers(made)]
        for layer in layers(made) if bias is not None else ():
            for row in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
                row.bias.data[:] = torch.linspace(-bias, bias, len(row.bias))
        if not convert:
            for layer in made.modules():
                if isinstance(layer, FP8Gemm):
                    layer.converter = None
        return fused, *forward_backward(made if fuse else unfused(made))


def on_a_rank(calls: list[tuple[Any, ...]]) -> list[Any]:
    return [found_on_a_rank(*call) for call in calls]


def on_two_ranks(*calls: tuple[Any, ...]) -> list[list[Any]]:
    """What both ranks find by each call of `found_on_a_rank`, in one start of processes."""
    return [list(found) for found in zip(*dist.run(on_a_rank, 2, list(calls)), strict=True)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on one GPU")
@each_once(3, shape=tuple(SHAPES), way=tuple(WAYS))
def test_over_two_ranks_the_blocks_are_close_to_the_composition(shape: str, way: str):
    assert_close_over_two_ranks(O3, shape, way)


def assert_close_over_two_ranks(recipe: Recipe, shape: str, way: str) -> None:
    # Outputs summed in E5M2 leave 11 dB of a bias's gradient either way: the two may lie further apart than each from FP32.
    third = [(FP32, shape, "sequence", False)] if way == "fp8 sums" else []
    found, expected, *rest = on_two_ranks((recipe, shape, way, True), (recipe, shape, way, False), *third)
    exact = rest[0] if rest else expected
    for (fused, losses, gradients), (_, _, composed), (_, exact_losses, exact_gradients) in zip(found, expected, exact, strict=True):
        assert fused == [True, True]
        assert losses.equal(found[0][1])
        torch.testing.assert_close(losses.mean(), exact_losses.mean(), rtol=0, atol=3e-2 if way == "fp8 sums" else 1e-2)
        assert gradients.keys() == composed.keys()
        close = {name: sqnr_db(exact_gradients[name].float(), gradients[name].float()) for name in gradients}
        # 2 dB less than on one GPU: sums travel in E5M2. RMSNorms of heads sharpen the attention, which costs 2 dB more; a bias of all keys
        # changes a softmax by their rotation only, so that its gradient is small: on one rank either of the two is closer by up to 4 dB.
        of_keys = {name for name in close if name.endswith("k_layernorm.bias")}
        assert {name: db for name, db in close.items() if db < (8 if shape == "qk norm" or name in of_keys else 10)} == {}
        if way == "fp8 sums":
            theirs = {name: sqnr_db(exact_gradients[name].float(), composed[name].float()) for name in gradients}
            # The gradient of a bias has few values: from seed to seed either of the two is closer by up to 5 dB.
            lost = {name: 6.0 if exact_gradients[name].dim() == 1 else 3.0 for name in close} | dict.fromkeys(of_keys, 8.0)
            assert {name: (db, theirs[name]) for name, db in close.items() if db < theirs[name] - lost[name]} == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on one GPU")
@pytest.mark.parametrize("recipe", [O2, O3])
def test_a_bias_of_rows_is_added_once(recipe: Recipe):
    calls = ((recipe, "rope", "sequence", fuse, True, bias) for fuse, bias in ((True, 0.3), (False, 0.3), (False, None)))
    fused, composed, without = (found[0][1] for found in on_two_ranks(*calls))
    alone = model(recipe, **SHAPES["rope"])
    for layer in layers(alone):
        layer.self_attention.linear_proj.bias.data[:] = layer.mlp.linear_fc2.bias.data[:] = torch.linspace(-0.3, 0.3, 64)
    expected = forward_backward(alone)[0]
    for losses in (fused, composed):
        assert (losses - expected).norm() < 0.25 * (without - expected).norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on one GPU")
def test_how_rows_are_spread_and_kept_changes_no_bit():
    whole, sequence, gathered = on_two_ranks(*((O3, "rope", way, True) for way in ("whole rows", "sequence", "gathered")))
    for rank in range(2):
        assert_same_bits(sequence[rank][1:], gathered[rank][1:])
        assert sequence[rank][1].equal(whole[rank][1])  # one scale for all rows, the same sums


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on one GPU")
@pytest.mark.parametrize("way", ["sequence", "whole rows"])
def test_operands_gathered_in_fp8_have_the_bits_of_those_cast_after_megatron_cores_gather(way: str):
    """O2 sends partial sums in BF16 as megatron-core does, so that only the place of the casts differs."""
    ours, theirs = on_two_ranks((O2, "rope", way, False), (O2, "rope", way, False, False))
    for rank in range(2):
        assert_same_bits(ours[rank][1:], theirs[rank][1:])


RECOMPUTED = [
    *itertools.product((["core_attn"], ["mlp"], ["core_attn", "mlp"]), ("rope", "llama"), (O2, O3)),
    (["core_attn", "mlp"], "qk norm", O3),
]


@pytest.mark.parametrize(
    # Of 12 three, in which each choice of one stands beside each of another or nearly so; and one with norms of the heads.
    ("modules", "shape", "recipe"),
    [pytest.param(*case, marks=[pytest.mark.nightly] * (i not in (3, 4, 10, 12))) for i, case in enumerate(RECOMPUTED)],
    ids=str,
)
def test_selective_recomputation_changes_no_bit(modules: list[str], shape: str, recipe: Recipe):
    made = model(recipe, **SHAPES[shape], recompute_granularity="selective", recompute_modules=modules)
    for layer in layers(made):
        assert layer.fused
        assert (layer.recompute_attention, layer.recompute_fc1) == ("core_attn" in modules, "mlp" in modules)
    assert_same_bits(forward_backward(made), forward_backward(model(recipe, **SHAPES[shape])))
