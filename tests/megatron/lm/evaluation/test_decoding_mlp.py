"""The MLPs of inference against the modules of the layers, and what a step reads."""

from typing import Any

import pytest
import torch

from helpers import hf_models, tiny
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.evaluation.decoding_mlp import MixtureMLP, inference_mlp
from megatron.lm.model.gpt import GPT, build_model
from msamp.numerics.tensor import ScalingTensor

SHARED: dict[str, Any] = {
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def made(precision: str, name: str = "mixtral", **settings: Any) -> GPT:
    config = hf_models.config(name, precision=precision, **settings)
    return build_model(config, build_recipe(config.precision), tiny.VOCABULARY).eval()


@pytest.mark.parametrize(("precision", "copies"), [("fp32", 0), ("O2", 2), ("O3", 2)])
def test_a_mixture_with_a_shared_expert_is_that_of_the_layer_for_every_token_alone(precision: str, copies: int):
    with tiny.started(hf_models.config("mixtral", precision=precision, **SHARED)), torch.no_grad():
        layer = made(precision, **SHARED).decoder.layers[0]
        mlp = inference_mlp(layer.mlp, layer.activation)
        assert isinstance(mlp, MixtureMLP)
        x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)).to(layer.mlp.config.params_dtype)
        y = mlp(x)
        assert hf_models.agree(y.float(), layer.mlp(x)[0].float(), 2e-6 if precision == "fp32" else 0.08)
        alone = torch.stack([mlp(x[:1, i : i + 1]) for i in range(5)], 1).flatten(1, 2)
        assert hf_models.agree(alone.float(), y[:1].float(), 2e-6 if precision == "fp32" else 2**-7)
        assert sum(one.dim() == 3 for one in mlp.tensors()) == copies


def test_copies_of_fp8_experts_follow_the_weights_at_the_same_address():
    with tiny.started(hf_models.config("mixtral", precision="O2")), torch.no_grad():
        layer = made("O2").decoder.layers[0].mlp
        mlp = MixtureMLP(layer, "swiglu")
        weight = layer.experts.fc1_weight.matrices[2]
        assert isinstance(weight, ScalingTensor)
        copy = next(x for x in mlp.tensors() if x.shape == (4, 48, 32))
        assert torch.equal(copy[2].float(), weight.dequantize(torch.float32))
        where = copy.data_ptr()
        weight.scale_inv.mul_(2)
        mlp.renew()
        assert torch.equal(copy[2].float(), weight.dequantize(torch.float32))
        assert next(x for x in mlp.tensors() if x.shape == (4, 48, 32)).data_ptr() == where
