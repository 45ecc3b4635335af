"""A tiny model of each architecture that converts to Hugging Face, and its logits on our side and on theirs."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers import tiny
from megatron.lm.config import Config
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.model.gpt import build_model
from megatron.lm.tools.convert.hugging_face import hf_config, hf_rules, hf_tensors

LLAMA: dict[str, Any] = {"normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True}
GROUPED: dict[str, Any] = {"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2}
EXPERTS: dict[str, Any] = LLAMA | GROUPED | {"num_experts": 4, "moe_router_topk": 2, "ffn_hidden_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"position_embedding_type": "learned_absolute", "hidden_dropout": 0.1},
    "gpt2 untied, narrow": {
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": True,
        "ffn_hidden_size": 48,
        "norm_epsilon": 1e-3,
    },
    "gpt_neox": {"untie_embeddings_and_output_weights": True},
    "gpt_neox tied, half rotated": {"rotary_percent": 0.5, "rotary_base": 500.0},
    "llama": LLAMA | GROUPED | {"untie_embeddings_and_output_weights": True, "rotary_base": 5e5},
    "llama stretched": LLAMA | {"use_rope_scaling": True, "rope_scaling_factor": 32.0, "rotary_base": 5e5},
    "llama interpolated": LLAMA | {"rotary_seq_len_interpolation_factor": 4.0},
    "qwen2": LLAMA | GROUPED | {"add_qkv_bias": True, "rotary_base": 1e6},
    "qwen3": LLAMA | GROUPED | {"untie_embeddings_and_output_weights": True, "qk_layernorm": True, "rotary_base": 1e6},
    "qwen3 tied, wide heads": LLAMA | GROUPED | {"qk_layernorm": True, "kv_channels": 16},
    "mixtral": EXPERTS | {"untie_embeddings_and_output_weights": True, "rotary_base": 1e6},
    "mixtral tied, wide heads": EXPERTS | {"kv_channels": 16, "moe_router_topk": 3},
    "qwen3_moe": EXPERTS | {"moe_ffn_hidden_size": 40, "untie_embeddings_and_output_weights": True, "qk_layernorm": True},
    "qwen3_moe half dense": EXPERTS
    | {"moe_ffn_hidden_size": 40, "qk_layernorm": True, "kv_channels": 16, "moe_layer_freq": "[0,1]", "moe_router_pre_softmax": True},
    "olmoe": EXPERTS
    | {
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
        "untie_embeddings_and_output_weights": True,
        "moe_router_pre_softmax": True,
    },
    "llama tied, wide heads, biases": LLAMA | GROUPED | {"kv_channels": 16, "disable_bias_linear": False},
}


def config(name: str, **settings: Any) -> Config:
    """The tiny run of one of MODELS, in FP32 unless `settings` say otherwise."""
    return tiny.config("unused", **({"precision": "fp32"} | MODELS[name] | settings))


def tokens(vocab_size: int = tiny.VOCABULARY) -> Tensor:
    """[2, 16] int64."""
    return torch.randint(vocab_size, (2, 16), generator=torch.Generator().manual_seed(3))


@functools.cache
def _shapes(settings: Config, vocab_size: int) -> dict[str, torch.Size]:
    with tiny.started(settings):
        model = build_model(*tiny.parts(settings), build_recipe(settings.precision), vocab_size)
    return {name: p.shape for name, p in model.named_parameters()}


def random_weights(settings: Config, vocab_size: int = tiny.VOCABULARY) -> dict[str, Tensor]:
    """Weights of a model of `settings`, all of them away from 0 and 1, FP32."""
    draw = torch.Generator().manual_seed(1)
    shapes = _shapes(settings, vocab_size)
    return {name: 0.2 * torch.randn(shape, generator=draw) + ("norm.weight" in name) for name, shape in shapes.items()}


def our_logits(settings: Config, vocab_size: int, weights: Mapping[str, Tensor]) -> Tensor:
    """FP32 [2, 16, vocab_size] of our model with `weights`, which must be all of its weights."""
    with tiny.started(settings), torch.no_grad():
        model = build_model(*tiny.parts(settings), build_recipe(settings.precision), vocab_size).eval()
        parameters = dict(model.named_parameters())
        assert set(parameters) == set(weights)
        for name, p in parameters.items():
            assert p.shape == weights[name].shape, name
            p.copy_(weights[name])
        x = tokens(vocab_size)
        logits = model(x, torch.arange(x.shape[1]).expand_as(x), None)
    return logits[..., :vocab_size].float()


def their_logits(folder: Path, vocab_size: int = tiny.VOCABULARY) -> Tensor:
    """FP32 [2, 16, vocab_size] of the model in a Hugging Face folder, every tensor of which must have found its place."""
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    with torch.no_grad():
        return model.eval()(tokens(vocab_size)).logits


def agree(a: Tensor, b: Tensor, share: float) -> bool:
    """Whether two tensors differ nowhere by more than `share` of the largest magnitude in `b`."""
    return a.shape == b.shape and bool((a - b).abs().max() <= share * b.abs().max())


def to_hf(
    config: Config, vocab_size: int, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json, their tensors) of whole tensors by the names of a model on one process, as `convert_checkpoint to-hf` writes them."""
    separate: dict[str, Tensor] = {}
    for name, x in weights.items():
        experts = name.endswith(("experts.fc1_weight", "experts.fc2_weight")) and x.dim() == 3
        separate |= {f"{name}.{e}": part for e, part in enumerate(x)} if experts else {name: x}
    about = hf_config(config.model, vocab_size, dtype, vocab_size - 1)
    return about, dict(hf_tensors(hf_rules(config.model, vocab_size, list(separate)), separate.__getitem__, dtype))
