"""The mixture-of-experts layer against a loop over tokens and experts."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers import tiny
from megatron.lm.build import build_training
from megatron.lm.model.moe.layer import MoE

pytestmark = pytest.mark.usefixtures("one_process")
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 24, "swiglu": True, "disable_bias_linear": True, "precision": "fp32"}


def mlp(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    gate, up = (fc1.double() @ x).chunk(2)
    return fc2.double() @ (functional.silu(gate) * up)


@pytest.mark.parametrize("shared", [None, 40])
def test_a_token_is_the_weighted_sum_of_its_experts_and_the_shared_one(shared: int | None):
    made = build_training(tiny.config("corpus", **EXPERTS, moe_shared_expert_intermediate_size=shared), tiny.VOCABULARY)
    layer = made.model.decoder.layers[0].mlp
    assert isinstance(layer, MoE)
    x = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(1))
    y, bias = layer(x)
    assert bias is None
    tokens, (probs, experts) = x.double().flatten(0, 1), layer.router(x)
    for token, row, weights, chosen in zip(tokens, y.flatten(0, 1), probs.double(), experts, strict=True):
        wanted = sum(p * mlp(token, layer.experts.fc1_weight[e], layer.experts.fc2_weight[e]) for p, e in zip(weights, chosen, strict=True))
        if layer.shared_experts is not None:
            wanted = wanted + mlp(token, layer.shared_experts.linear_fc1.weight, layer.shared_experts.linear_fc2.weight)
        torch.testing.assert_close(row.double(), wanted, rtol=1e-4, atol=1e-7)


def test_an_expert_starts_from_the_same_weights_whichever_others_a_rank_has():
    config = tiny.config("corpus", **EXPERTS)
    weights = build_training(config, tiny.VOCABULARY).model.decoder.layers[0].mlp.experts
    assert not torch.equal(weights.fc1_weight[0], weights.fc1_weight[1])
    assert float(weights.fc1_weight.std()) == pytest.approx(0.02, rel=0.05)
    assert float(weights.fc2_weight.std()) == pytest.approx(0.02 / 2, rel=0.05)  # sqrt(2 layers x 2)
    wider = build_training(tiny.config("corpus", **EXPERTS | {"num_experts": 6}), tiny.VOCABULARY).model.decoder.layers[0].mlp.experts
    assert torch.equal(wider.fc1_weight[:4], weights.fc1_weight)
