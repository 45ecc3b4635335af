"""Logits for scoring against the model's own forward; sequences in a batch against each alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import hf_models, tiny
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.evaluation.scoring_model import ScoringModel, linear, mlp
from megatron.lm.model.gpt import GPT, build_model
from msamp.numerics.tensor import ScalingTensor

LEVELS = ("fp32", "bf16", "O1", "O3", "coat")
# FP32 but for the order of sums. In FP8 the casts have other scales than a forward's: 2^-4 of single values.
SHARE = {"fp32": 2e-6, "bf16": 2**-7}
TOKENS = torch.randint(tiny.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(3))
SHARED: dict[str, Any] = {
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def built(name: str, precision: str, **settings: Any) -> GPT:
    config = hf_models.config(name, precision=precision, **settings)
    model = build_model(*tiny.parts(config), build_recipe(config.precision), tiny.VOCABULARY).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not isinstance(parameter, ScalingTensor) and parameter.dim() == 1:  # biases and norms that do something
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw).to(parameter))
    return model


def logits(model: GPT, sequences: list[list[int]]) -> list[Tensor]:
    scoring = ScoringModel(model, 16)
    hidden = scoring.hidden(sequences)
    return [scoring.head(hidden[row, : len(sequence)]).cpu() for row, sequence in enumerate(sequences)]


CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((name, "fp32", {}) for name in hf_models.MODELS),
    *(("llama", level, {}) for level in LEVELS[1:]),
    ("mixtral", "fp32", SHARED),
    ("mixtral", "O3", SHARED),
    ("gpt_neox", "fp32", {"squared_relu": True, "position_embedding_type": "none", "disable_bias_linear": True, "add_qkv_bias": True}),
]


@pytest.mark.parametrize(("name", "level", "settings"), CASES)
def test_logits_are_those_of_the_model(name: str, level: str, settings: dict[str, Any]):
    with tiny.started(hf_models.config(name, precision=level, **settings)), torch.no_grad():
        model = built(name, level, **settings)
        x = TOKENS.to(next(model.parameters()).device)
        expected = model(x, torch.arange(12, device=x.device).expand_as(x), None).float().cpu()
        assert hf_models.agree(torch.stack(logits(model, TOKENS.tolist())), expected, SHARE.get(level, 0.08))


@pytest.mark.parametrize(("name", "level"), [("llama", "fp32"), ("llama", "O1"), ("llama", "O3"), ("mixtral", "O2")])
def test_a_sequence_has_the_logits_that_it_has_alone(name: str, level: str):
    with tiny.started(hf_models.config(name, precision=level)):
        model = built(name, level)
        prompts = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 7, 8]]
        for prompt, together in zip(prompts, logits(model, prompts), strict=True):
            assert hf_models.agree(logits(model, [prompt])[0], together, 1e-5 if level == "fp32" else 2**-6)


def test_one_sequence_with_large_values_leaves_the_others_as_they_are():
    """One scale for the batch would drown the small rows."""
    with tiny.started(hf_models.config("gpt2", precision="O3")):
        model = built("gpt2", "O3")
        with torch.no_grad():
            model.embedding.word_embeddings.weight[9] *= 1e4
        assert hf_models.agree(logits(model, [[1, 2, 3], [9, 9, 9]])[0], logits(model, [[1, 2, 3]])[0], 2**-6)


def test_a_model_trained_with_fp8_attention_is_scored_in_the_compute_dtype():
    found = []
    for way in ("fp8", "bf16"):
        with tiny.started(hf_models.config("llama", precision="O3")):
            found.append(logits(built("llama", "O3", attention_precision=way, kv_channels=16), TOKENS.tolist())[0])
    assert found[0].equal(found[1])


@pytest.mark.parametrize("precision", ["fp32", "O3"])
def test_a_token_of_a_mixture_has_the_result_that_it_has_alone(precision: str):
    with tiny.started(hf_models.config("mixtral", precision=precision, **SHARED)), torch.no_grad():
        layer = built("mixtral", precision, **SHARED).decoder.layers[0]
        x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)).to(layer.mlp.config.params_dtype)
        run = mlp(layer.mlp, layer.activation)
        alone = torch.stack([run(x[:1, i : i + 1]) for i in range(5)], 1).flatten(1, 2)
        assert hf_models.agree(alone.float(), run(x)[:1].float(), 2e-6 if precision == "fp32" else 2**-7)


def test_a_token_outside_the_vocabulary_is_refused():
    with tiny.started(hf_models.config("gpt2", precision="fp32")), pytest.raises(ValueError, match="64"):
        logits(built("gpt2", "fp32"), [[64]])


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["bf16", "O2", "O3"])
def test_on_a_gpu_a_linear_layer_multiplies_as_on_a_cpu(level: str):
    settings = {"hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "num_query_groups": 2}
    with tiny.started(hf_models.config("llama", precision=level, **settings)), torch.no_grad():
        module = built("llama", level, **settings).decoder.layers[0].self_attention.linear_qkv
        x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
        weight = module.weight.dequantize(torch.float32) if isinstance(module.weight, ScalingTensor) else module.weight.float()
        assert hf_models.agree(linear(module)(x).float(), x.float() @ weight.t(), 0.05)
