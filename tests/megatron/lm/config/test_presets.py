"""Sizes as in the papers; parameters and FLOPs against a layer-by-layer count."""

import dataclasses
import json
import math
import tomllib
from pathlib import Path

import pytest
import torch

from megatron.lm.config import ModelConfig
from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import active_parameter_count, flops_per_token, parameter_count, preset, published_vocabulary
from megatron.lm.tools.convert.architectures import ARCHITECTURES
from megatron.lm.tools.convert.hugging_face import hf_config

VOCABULARY = 50304
FP8_LM_TABLE_1 = {  # hidden, heads, layers, TP, PP, learning rate, tokens a batch in millions, tokens in billions
    "125m": (768, 12, 12, 1, 1, 6e-4, 1, 100),
    "7b": (4096, 32, 32, 1, 1, 3e-4, 4, 100),
    "13b": (5120, 40, 40, 2, 1, 3e-4, 4, 100),
    "175b": (12288, 96, 96, 8, 4, 3e-5, 1, 40),
}


PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
ACTIVE = [name for name, published in PUBLISHED.items() if "active" in published]


def model(name: str, **changes) -> ModelConfig:
    return dataclasses.replace(parse_args(["--preset", name]).model, **changes)


def count(m: ModelConfig, vocabulary: int) -> int:
    """Elements of every parameter of the GPT, listed one by one."""
    h, q, kv, ffn = m.hidden_size, m.num_attention_heads * m.head_size, m.query_groups * m.head_size, m.ffn_size
    norm = [h] if m.normalization == "RMSNorm" else [h, h]
    weights = [(q, h), (kv, h), (kv, h), (h, q), *[(ffn, h)] * (2 if m.swiglu else 1), (h, ffn)]
    biases = [rows for rows, _ in weights] if not m.disable_bias_linear else [q, kv, kv] if m.add_qkv_bias else []
    heads = [vocabulary * h] * (2 if m.untie_embeddings_and_output_weights else 1)
    learned = [m.max_positions * h] if m.position_embedding_type == "learned_absolute" else []
    of_keys = [q, kv] if m.qk_layernorm_scope == "projection" else [m.head_size] * 2
    heads_normed = of_keys * (len(norm) if m.qk_layernorm else 0)
    layer = [rows * columns for rows, columns in weights] + biases + norm + norm + heads_normed
    return sum(m.num_layers * layer + norm + heads + learned)


@pytest.mark.parametrize("name", FP8_LM_TABLE_1)
def test_sizes_are_those_of_table_1(name):
    hidden, heads, layers, tp, pp, lr, batch, tokens = FP8_LM_TABLE_1[name]
    values = preset(name)
    assert (values["hidden_size"], values["num_attention_heads"], values["num_layers"]) == (hidden, heads, layers)
    assert (values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]) == (tp, pp)
    assert values["lr"] == lr
    assert values["min_lr"] == pytest.approx(lr / 10)
    assert values["global_batch_size"] * values["seq_length"] == batch * 2**20
    assert values["train_iters"] * batch * 2**20 == pytest.approx(tokens * 1e9, rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True, "untie_embeddings_and_output_weights": True},
        {"disable_bias_linear": True, "add_qkv_bias": True},
        {"squared_relu": True, "position_embedding_type": "none", "qk_layernorm": True, "normalization": "RMSNorm", "kv_channels": 128},
        {"qk_layernorm": True, "qk_layernorm_scope": "projection", "group_query_attention": True, "num_query_groups": 4},
        {"position_embedding_type": "learned_absolute", "max_position_embeddings": 4096, "ffn_hidden_size": 1000},
    ],
)
def test_parameters_are_those_of_the_layers(changes):
    changed = model("125m", **changes)
    assert parameter_count(changed, VOCABULARY) == count(changed, VOCABULARY)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_parameters_and_its_configuration(name):
    parameters, settings = PUBLISHED[name]["parameters"], PUBLISHED[name]["config"]
    assert published_vocabulary(name) == settings["vocab_size"]
    assert parameter_count(model(name), settings["vocab_size"]) == parameters
    theirs = json.loads(json.dumps(hf_config(parse_args(["--preset", name]).model, settings["vocab_size"], torch.bfloat16, 0)))
    assert {key: theirs.get(key) for key in settings} == settings
    assert theirs.get("clip_qkv") is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_builds_the_same_model_from_our_settings(name):
    transformers = pytest.importorskip("transformers")
    vocabulary, ours = published_vocabulary(name), parse_args(["--preset", name])
    settings = hf_config(ours.model, vocabulary, torch.bfloat16, 0)
    config = transformers.AutoConfig.for_model(**settings)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in theirs.parameters()) == PUBLISHED[name]["parameters"]
    rules = ARCHITECTURES[settings["model_type"]].rules(ours.model, vocabulary)
    shapes = {key: shape for rule in rules for key, shape in zip(rule.theirs, rule.their_shapes(), strict=True)}
    if name in ACTIVE:  # the modules of transformers have all experts in one tensor, its files each expert's
        assert sum(math.prod(shape) for shape in shapes.values()) == PUBLISHED[name]["parameters"]
        return
    assert shapes == {key: tuple(p.shape) for key, p in theirs.named_parameters()}


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_its_experts_only(name):
    config = model(name)
    assert active_parameter_count(config, published_vocabulary(name)) == PUBLISHED[name]["active"]
    attention = 6 * config.num_layers * config.num_attention_heads * config.head_size * config.seq_length
    looked_up = config.hidden_size * published_vocabulary(name)
    assert flops_per_token(config, published_vocabulary(name)) == 6 * (PUBLISHED[name]["active"] - looked_up) + attention


def test_flops_are_six_a_parameter_and_causal_attention():
    gpt = model("1.3b")
    expected = 6 * parameter_count(gpt, VOCABULARY) + 6 * 24 * 2048 * 2048
    assert flops_per_token(gpt, VOCABULARY) == expected
    looked_up = dataclasses.replace(gpt, untie_embeddings_and_output_weights=True, position_embedding_type="learned_absolute")
    assert flops_per_token(looked_up, VOCABULARY) == expected  # neither a second embedding nor positions multiply anything
