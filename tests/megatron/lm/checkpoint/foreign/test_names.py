"""Names of Megatron-LM's checkpoints, of its local spec and of Transformer Engine's, with layers stacked or each by itself."""

import pytest

from megatron.lm.checkpoint.foreign.names import layer_of, ours, theirs


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("embedding.word_embeddings.weight", ("model", "embedding.word_embeddings.weight", False)),
        ("decoder.layers.mlp.linear_fc1.layer_norm_weight", ("model", "decoder.layers.{}.pre_mlp_layernorm.weight", True)),
        ("decoder.layers.self_attention.linear_qkv.layer_norm_bias", ("model", "decoder.layers.{}.input_layernorm.bias", True)),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_bias", ("model", "decoder.layers.3.input_layernorm.bias", False)),
        ("decoder.layers.12.mlp.linear_fc2.weight", ("model", "decoder.layers.12.mlp.linear_fc2.weight", False)),
        ("optimizer.state.fp32_param.output_layer.weight", ("master", "output_layer.weight", False)),
        ("optimizer.state.param.decoder.layers.mlp.linear_fc2.bias", ("master", "decoder.layers.{}.mlp.linear_fc2.bias", True)),
        ("optimizer.state.exp_avg_sq.decoder.final_layernorm.weight", ("exp_avg_sq", "decoder.final_layernorm.weight", False)),
        ("optimizer.state.momentum_buffer.output_layer.weight", None),
        ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg", None),
    ],
)
def test_a_key_of_megatron(key: str, expected: tuple[str, str, bool] | None):
    assert ours(key) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.3.input_layernorm.weight", ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", 3)),
        ("decoder.layers.0.pre_mlp_layernorm.bias", ("decoder.layers.mlp.linear_fc1.layer_norm_bias", 0)),
        ("decoder.layers.11.self_attention.q_layernorm.weight", ("decoder.layers.self_attention.q_layernorm.weight", 11)),
        ("decoder.final_layernorm.weight", ("decoder.final_layernorm.weight", None)),
    ],
)
def test_a_name_of_ours_and_back(name: str, expected: tuple[str, int | None]):
    assert theirs(name) == expected
    back = ours(expected[0])
    assert back is not None
    assert back.name.format(expected[1]) == name


def test_the_layer_in_a_name():
    assert layer_of("decoder.layers.7.mlp.linear_fc1.weight") == (7, "mlp.linear_fc1.weight")
    assert layer_of("output_layer.weight") == (None, "output_layer.weight")
