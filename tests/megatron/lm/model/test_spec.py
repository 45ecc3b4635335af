from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron.lm.config import Config, ModelConfig, OptimizerConfig, TrainingConfig
from megatron.lm.model.attention import SDPAttention
from megatron.lm.model.gpt import assemble, transformer_config
from megatron.lm.model.norm import HeadRMSNorm, LayerNorm, RMSNorm
from megatron.lm.model.spec import LayerOptions, block_spec

pytestmark = pytest.mark.usefixtures("one_process")


class Column(ColumnParallelLinear):
    pass


class Row(RowParallelLinear):
    pass


LINEARS = {"linear_qkv": Column, "linear_proj": Row, "linear_fc1": Column, "linear_fc2": Row}


def config(**model: object) -> Config:
    return Config(
        model=ModelConfig(num_layers=3, hidden_size=16, num_attention_heads=2, seq_length=8, **model),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(micro_batch_size=1, train_iters=1),
    )


@pytest.mark.parametrize(("normalization", "norm"), [("LayerNorm", LayerNorm), ("RMSNorm", RMSNorm)])
def test_given_classes_stand_in_their_slots(normalization: str, norm: type):
    settings = config(normalization=normalization, attention_backend="math")
    core_config = transformer_config(settings, SimpleNamespace(name="fp32", compute_dtype=torch.float32))
    model = assemble(settings, core_config, 32, LINEARS | {"output_layer": Column})
    assert len(model.decoder.layers) == 3
    for layer in model.decoder.layers:
        assert type(layer.self_attention.linear_qkv) is type(layer.mlp.linear_fc1) is Column
        assert type(layer.self_attention.linear_proj) is type(layer.mlp.linear_fc2) is Row
        assert type(layer.self_attention.core_attention) is SDPAttention
        assert layer.self_attention.core_attention.backends == [torch.nn.attention.SDPBackend.MATH]
        assert type(layer.input_layernorm) is type(layer.pre_mlp_layernorm) is norm
    assert type(model.decoder.final_layernorm) is norm
    assert type(model.output_layer) is Column


def test_norms_of_queries_and_keys_stand_in_their_slots():
    settings = config(qk_layernorm=True, normalization="RMSNorm")
    core_config = transformer_config(settings, SimpleNamespace(name="fp32", compute_dtype=torch.float32))
    for layer in assemble(settings, core_config, 32, LINEARS | {"output_layer": Column}).decoder.layers:
        assert type(layer.self_attention.q_layernorm) is type(layer.self_attention.k_layernorm) is HeadRMSNorm
        assert layer.self_attention.q_layernorm.weight.shape == (8,)


def test_only_the_qkv_layer_has_a_bias_with_add_qkv_bias():
    settings = config(normalization="RMSNorm", disable_bias_linear=True, add_qkv_bias=True)
    core_config = transformer_config(settings, SimpleNamespace(name="fp32", compute_dtype=torch.float32))
    model = assemble(settings, core_config, 32, LINEARS | {"output_layer": Column})
    biases = {name.split(".", 3)[-1] for name, _ in model.named_parameters() if name.endswith("bias")}
    assert biases == {"self_attention.linear_qkv.bias"}


def test_a_block_holds_this_stage_s_layers():
    core_config = transformer_config(config(), SimpleNamespace(name="fp32", compute_dtype=torch.float32))
    spec = block_spec(core_config, LINEARS, LayerOptions())
    assert len(spec.layer_specs) == 3
    assert spec.layer_norm is LayerNorm
