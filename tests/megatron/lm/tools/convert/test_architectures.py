"""Which architecture takes which model."""

import pytest
import torch

from helpers.hf_models import MODELS, config
from megatron.lm.tools.convert.architectures import ARCHITECTURES, architecture_of
from megatron.lm.tools.convert.layouts import HALVES, QKV, SAME, STACKED_QKV, TRANSPOSED


def test_each_model_has_its_architecture():
    assert {name: architecture_of(config(name).model).model_type for name in MODELS} == {name: name.split()[0] for name in MODELS}


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("gpt2", {"swiglu": True}, "gpt2 does not support --swiglu True;"),
        ("gpt2", {"disable_bias_linear": True}, "gpt2 does not support --disable-bias-linear True;"),
        ("gpt_neox", {"normalization": "RMSNorm"}, "gpt_neox does not support --normalization RMSNorm;"),
        ("gpt_neox", {"kv_channels": 8}, "gpt_neox does not support --kv-channels 8 with --hidden-size 32;"),
        ("llama", {"qk_layernorm": True, "disable_bias_linear": False}, "qwen3 does not support --disable-bias-linear False. "),
        ("gpt2", {"squared_relu": True}, "gpt2 does not support --squared-relu True;"),
        ("gpt_neox", {"position_embedding_type": "none"}, " does not support --position-embedding-type none;"),
        ("gpt_neox", {"use_rope_scaling": True}, "gpt_neox does not support --use-rope-scaling;"),
        ("qwen3", {"add_qkv_bias": True}, "qwen3 does not support --add-qkv-bias True. "),
        ("llama", {"normalization": "LayerNorm"}, "llama does not support --normalization LayerNorm; "),
        ("llama", {"rotary_percent": 0.5}, "llama does not support --rotary-percent 0.5; "),
        ("llama", {"hidden_size": 34, "kv_channels": 16}, "llama does not support --kv-channels 16 with --hidden-size 34; "),
        ("mixtral", {"moe_router_pre_softmax": True}, "mixtral does not support --moe-router-pre-softmax True; "),
        ("mixtral", {"moe_layer_freq": "2"}, "mixtral does not support --moe-layer-freq 2; "),
        ("mixtral", {"moe_router_score_function": "sigmoid"}, "olmoe does not support --moe-router-score-function sigmoid, --qk-layernorm"),
        ("olmoe", {"kv_channels": 16}, "olmoe does not support --kv-channels 16 with --hidden-size 32. "),
        ("qwen3", {"qk_layernorm_scope": "projection"}, "qwen3 does not support --qk-layernorm-scope projection. "),
    ],
)
def test_a_model_that_none_holds_is_refused_by_its_settings(name, settings, named):
    with pytest.raises(ValueError, match="export-bf16 writes any model") as error:
        architecture_of(config(name, **settings).model)
    assert named in str(error.value)


def test_grouped_attention_is_refused_where_it_is_unknown():
    settings = config("gpt_neox", num_attention_heads=4, group_query_attention=True, num_query_groups=2)
    with pytest.raises(ValueError, match="gpt_neox does not support --num-query-groups 2"):
        architecture_of(settings.model)


def test_rules_name_every_tensor_once():
    for name in MODELS:
        model = config(name).model
        rules = list(ARCHITECTURES[name.split()[0]].rules(model, 60))
        theirs = [one for rule in rules for one in rule.theirs]
        assert len({rule.ours for rule in rules}) == len(rules), name
        assert len(set(theirs)) == len(theirs), name
        experts = len(model.moe_layers)
        assert sum(rule.linear for rule in rules) == 4 * model.num_layers + experts * (2 * (model.num_experts or 0) - 2), name


# Every layout is undone by its inverse.


def test_query_key_and_value_come_out_of_their_groups():
    model = config("llama").model  # 4 query heads and 2 groups of width 8
    rows = torch.arange(2 * (2 + 2) * 8)
    q, k, v = QKV.split(model, rows)
    first, second = rows.chunk(2)
    assert torch.equal(q, torch.cat([first[:16], second[:16]]))
    assert torch.equal(k, torch.cat([first[16:24], second[16:24]]))
    assert torch.equal(v, torch.cat([first[24:], second[24:]]))


@pytest.mark.parametrize("layout", [SAME, TRANSPOSED, HALVES, QKV, STACKED_QKV])
@pytest.mark.parametrize("shape", [(96, 32), (96,)])
def test_join_undoes_split(layout, shape):
    model = config("gpt2").model  # 2 heads of width 16: 96 rows
    x = torch.randn(shape)
    assert torch.equal(layout.join(model, layout.split(model, x)), x)
