"""What a shape leaves open."""

import dataclasses

import pytest

from megatron.lm.config import ModelConfig
from megatron.lm.config.sections.model import layer_pattern

GPT = ModelConfig(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=64)


def test_derived_shape():
    assert (GPT.ffn_size, GPT.query_groups, GPT.head_size, GPT.max_positions) == (512, 4, 32, 64)
    other = dataclasses.replace(
        GPT, ffn_hidden_size=100, group_query_attention=True, num_query_groups=2, kv_channels=8, max_position_embeddings=256
    )
    assert (other.ffn_size, other.query_groups, other.head_size, other.max_positions) == (100, 2, 8, 256)
    assert dataclasses.replace(GPT, group_query_attention=True).query_groups == 1


@pytest.mark.parametrize(("hidden", "ffn"), [(4096, 10880), (768, 2048), (128, 320), (16, 64)])
def test_swiglu_width_is_megatrons(hidden, ffn):
    assert dataclasses.replace(GPT, hidden_size=hidden, swiglu=True).ffn_size == ffn


@pytest.mark.parametrize(
    ("text", "layers", "wanted"),
    [
        ("1", 3, "111"),
        ("2", 5, "10101"),
        ("([0]*1+[1]*3)", 4, "0111"),
        ("2*[0, 1]", 4, "0101"),
        ("[1]*0+[0,1]", 2, "01"),
    ],
)
def test_layers_with_experts_are_those_of_megatron_lms_expression(text: str, layers: int, wanted: str):
    assert "".join(str(int(one)) for one in layer_pattern(text, layers)) == wanted


@pytest.mark.parametrize(
    "text", ["0", "-1", "x", "[2]*4", "[1]*3", "[1]*9**9", "[[1]]*4", "[1]*4 + 1", "True", "__import__('os')", "(" * 500, "1.5"]
)
def test_an_expression_that_is_no_list_of_layers_is_refused(text: str):
    with pytest.raises(ValueError, match=r"^--moe-layer-freq .*(give|has)"):
        layer_pattern(text, 4)
