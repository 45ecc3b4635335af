import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.lm.config.presets import PRESETS
from tools.bench.baselines import bench_torchao as bench

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}


def test_the_llama_is_transformers():
    """The loss is that of LlamaForCausalLM with the same weights; ours has its residual stream in BF16."""
    torch.manual_seed(0)
    shape = PRESETS["llama3-8b"] | SIZES | {"num_query_groups": 2, "ffn_hidden_size": 48}
    ours = bench.build("bf16", "eager", shape, 64, torch.device("cpu")).float()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": shape["rotary_base"]}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=64, rms_norm_eps=1e-5, rope_parameters=rope, **sizes))
    weights = {"lm_head.weight": ours.get_parameter("head.weight"), "model.norm.weight": ours.get_parameter("head.norm.weight")}
    weights["model.embed_tokens.weight"] = ours.get_parameter("embedding.weight")
    for number, layer in enumerate(ours.get_submodule("layers").children()):
        query, key, value = layer.get_parameter("qkv.weight").split([32, 16, 16])
        gate, up = layer.get_parameter("fc1.weight").chunk(2)
        names = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value, "mlp.gate_proj": gate, "mlp.up_proj": up}
        same = {"self_attn.o_proj": "proj", "mlp.down_proj": "fc2", "input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
        names |= {name: layer.get_parameter(f"{own}.weight") for name, own in same.items()}
        weights |= {f"model.layers.{number}.{name}.weight": weight for name, weight in names.items()}
    theirs.load_state_dict(weights)
    tokens = torch.randint(0, 64, (2, 17))
    want = torch.nn.functional.cross_entropy(theirs(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    with torch.autocast("cpu", torch.bfloat16):
        got = ours(tokens[:, :-1], tokens[:, 1:])
    assert got.item() == pytest.approx(want.item(), rel=1e-3)


def test_a_line_per_build_also_of_one_that_fails(capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "125m", PRESETS["125m"] | SIZES)
    monkeypatch.setattr("tools.bench.training_steps.published_vocabulary", lambda name: 64)
    assert bench.main(["--preset", "125m", "--builds", "eager", "--steps", "2", "--micro-batch-size", "2"]) == 1  # torchao is not installed
    row, failed = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["case"], row["params_m"]) == ("bf16 eager", 0.0)
    assert row["loss"] < 5  # 4.85 is that of equal probabilities of 128 tokens
    assert row["tokens_s_gpu"] == pytest.approx(32e3 / row["ms"], rel=0.1)
    assert failed["case"] == "ao-tensorwise eager"
    assert "torchao" in failed["error"]
