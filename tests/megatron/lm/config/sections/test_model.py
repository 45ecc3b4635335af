"""What a shape leaves open."""

import dataclasses

import pytest

from megatron.lm.config import ModelConfig

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
