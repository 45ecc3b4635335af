"""Sizes as in the papers; parameters and FLOPs against a layer-by-layer count."""

import dataclasses

import pytest

from megatron.lm.config import ModelConfig
from megatron.lm.config.cli import parse_args, section_types
from megatron.lm.presets import PRESETS, flops_per_token, parameter_count, preset

VOCABULARY = 50304
FP8_LM_TABLE_1 = {  # hidden, heads, layers, TP, PP, learning rate, tokens a batch in millions, tokens in billions
    "125m": (768, 12, 12, 1, 1, 6e-4, 1, 100),
    "7b": (4096, 32, 32, 1, 1, 3e-4, 4, 100),
    "13b": (5120, 40, 40, 2, 1, 3e-4, 4, 100),
    "175b": (12288, 96, 96, 8, 4, 3e-5, 1, 40),
}


def model(name: str, **changes) -> ModelConfig:
    return dataclasses.replace(parse_args(["--preset", name]).model, **changes)


def count(m: ModelConfig, vocabulary: int) -> int:
    """Elements of every parameter of the GPT, listed one by one."""
    h, q, kv, ffn = m.hidden_size, m.num_attention_heads * m.head_size, m.query_groups * m.head_size, m.ffn_size
    norm = [h] if m.normalization == "RMSNorm" else [h, h]
    weights = [(q, h), (kv, h), (kv, h), (h, q), *[(ffn, h)] * (2 if m.swiglu else 1), (h, ffn)]
    biases = [] if m.disable_bias_linear else [rows for rows, _ in weights]
    heads = [vocabulary * h] * (2 if m.untie_embeddings_and_output_weights else 1)
    learned = [m.max_positions * h] if m.position_embedding_type == "learned_absolute" else []
    layer = [rows * columns for rows, columns in weights] + biases + norm + norm
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
    ("name", "millions"), [("125m", 123.7), ("345m", 353.8), ("1.3b", 1311.6), ("7b", 6650), ("13b", 12843), ("175b", 174580)]
)
def test_parameters_deserve_the_name(name, millions):
    assert parameter_count(model(name), VOCABULARY) / 1e6 == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True, "untie_embeddings_and_output_weights": True},
        {"group_query_attention": True, "num_query_groups": 4, "kv_channels": 32},
        {"position_embedding_type": "learned_absolute", "max_position_embeddings": 4096, "ffn_hidden_size": 1000},
    ],
)
def test_parameters_are_those_of_the_layers(changes):
    changed = model("125m", **changes)
    assert parameter_count(changed, VOCABULARY) == count(changed, VOCABULARY)


def test_flops_are_six_a_parameter_and_causal_attention():
    gpt = model("1.3b")
    expected = 6 * parameter_count(gpt, VOCABULARY) + 6 * 24 * 2048 * 2048
    assert flops_per_token(gpt, VOCABULARY) == expected
    looked_up = dataclasses.replace(gpt, untie_embeddings_and_output_weights=True, position_embedding_type="learned_absolute")
    assert flops_per_token(looked_up, VOCABULARY) == expected  # neither a second embedding nor positions multiply anything


def test_presets_name_real_settings_and_cannot_be_changed():
    known = {setting.name for cls in section_types().values() for setting in dataclasses.fields(cls)}
    for name, values in PRESETS.items():
        assert set(values) <= known
        assert parse_args(["--preset", name]).model.num_layers == values["num_layers"]
    preset("7b")["lr"] = 1.0
    assert preset("7b")["lr"] == 3e-4


def test_an_unknown_size_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"--preset '6b' is unknown: choose one of 125m, .*, 175b"):
        preset("6b")
