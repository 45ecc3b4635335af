"""Our models and transformers' own give the same logits, both ways; what is not the same model is refused."""

import json

import pytest
import torch

from helpers import numerics
from helpers.choices import every_value
from helpers.hf_models import MODELS, agree, config, our_logits, random_weights, their_logits, to_hf
from helpers.tiny import VOCABULARY
from megatron.lm.hugging_face.folder import Tensors, write_json, write_tensors
from megatron.lm.tools.convert.hugging_face import from_hf
from megatron.lm.tools.convert.layouts import EMBEDDING, HEAD

transformers = pytest.importorskip("transformers")

SMALL = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16},
    "gpt_neox": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "use_parallel_residual": False,
    },
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 16,
    },
}
SMALL["qwen2"] = SMALL["llama"]
SMALL["mixtral"] = SMALL["llama"] | {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL["olmoe"] = SMALL["llama"] | {"num_experts": 4, "num_experts_per_tok": 2}
SMALL["olmoe, normalized"] = SMALL["olmoe"] | {"norm_topk_prob": True, "num_key_value_heads": 4}
SMALL["qwen3_moe"] = SMALL["olmoe"] | {"moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16}
SMALL["qwen3_moe, every second"] = SMALL["qwen3_moe"] | {"decoder_sparse_step": 2, "norm_topk_prob": False}
SMALL["qwen3_moe, but the second"] = SMALL["qwen3_moe"] | {"mlp_only_layers": [1]}
SMALL["llama, stretched"] = SMALL["llama"] | {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}


def exported(folder, about, weights):
    folder.mkdir(exist_ok=True)
    write_tensors(folder, weights.items())
    write_json(folder / "config.json", about)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_exported_models_give_our_logits_in_transformers_and_come_back(name, tmp_path):
    settings = config(name)
    weights = random_weights(settings)
    about, theirs = to_hf(settings, VOCABULARY, weights)
    assert about["vocab_size"] == VOCABULARY
    ours = our_logits(settings, VOCABULARY, weights)
    assert agree(their_logits(exported(tmp_path / "hf", about, theirs)), ours, numerics.HF_LOGITS)

    back, vocab_size, again = from_hf(about, theirs, divisible_by=32)
    assert back.model == settings.model
    assert vocab_size == VOCABULARY
    assert again.keys() == weights.keys()
    for key, x in weights.items():
        rows = VOCABULARY if key in (EMBEDDING, HEAD) else x.shape[0]
        assert torch.equal(again[key][:rows], x[:rows]), key


@every_value
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("tied", [False, True])
def test_models_of_transformers_give_their_logits_here(kind, tied, tmp_path):
    torch.manual_seed(2)
    about = transformers.AutoConfig.for_model(
        kind.partition(",")[0], vocab_size=VOCABULARY, tie_word_embeddings=tied, initializer_range=0.2, **SMALL[kind]
    )
    model = transformers.AutoModelForCausalLM.from_config(about)
    for p in model.parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, mean=0.5)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    found = json.loads((tmp_path / "config.json").read_text())
    settings, vocab_size, weights = from_hf(found, Tensors(tmp_path), divisible_by=32)
    assert weights[EMBEDDING].shape[0] == 64
    assert (HEAD in weights) == (not tied)
    assert agree(our_logits(settings, vocab_size, weights), their_logits(tmp_path), numerics.HF_LOGITS)


def test_the_padding_takes_next_to_nothing_of_the_softmax():
    settings = config("gpt2", make_vocab_size_divisible_by=1)
    weights = random_weights(settings)
    weights[EMBEDDING] += 3 * weights[EMBEDDING].mean(1, keepdim=True).sign()  # logits far from 0
    about, theirs = to_hf(settings, VOCABULARY, weights)
    padded, _, ours = from_hf(about, theirs, divisible_by=1000)
    assert ours[EMBEDDING].shape[0] == 1000
    logits = our_logits(padded, 1000, ours)
    share = torch.softmax(logits, -1)[..., VOCABULARY:].sum(-1)
    assert share.max() <= (1000 - VOCABULARY) / VOCABULARY
    assert (torch.softmax(logits, -1)[..., VOCABULARY] <= 1 / VOCABULARY).all()


def test_a_smaller_tokenizer_leaves_the_other_rows_as_padding():
    settings = config("gpt_neox")
    about, theirs = to_hf(settings, VOCABULARY, random_weights(settings))
    data = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "tokenizer.json"}
    imported, vocab_size, ours = from_hf(about, theirs, data, vocab_size=55, divisible_by=29)  # 58 rows
    assert (vocab_size, imported.model.vocab_size, imported.data.tokenizer_model) == (55, None, "tokenizer.json")
    assert torch.equal(ours[HEAD], theirs["embed_out.weight"][:58])
    with pytest.raises(ValueError, match="the tokenizer has 61 tokens, but the model's embedding has 60 rows"):
        from_hf(about, theirs, data, vocab_size=61)


def test_bf16_stays_bf16_and_fp16_becomes_fp32():
    settings = config("llama")
    about, theirs = to_hf(settings, VOCABULARY, random_weights(settings), torch.bfloat16)
    assert about["torch_dtype"] == "bfloat16"
    imported, _, ours = from_hf(about, theirs)
    assert imported.precision.name == "bf16"
    assert {x.dtype for x in ours.values()} == {torch.bfloat16}
    imported, _, ours = from_hf(about, {name: x.half() for name, x in theirs.items()})
    assert imported.precision.name == "fp32"
    assert {x.dtype for x in ours.values()} == {torch.float32}


def test_bare_models_masks_and_second_heads_are_read():
    settings = config("gpt2")
    about, theirs = to_hf(settings, VOCABULARY, random_weights(settings))
    bare = {name.removeprefix("transformer."): x for name, x in theirs.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "lm_head.weight": theirs["transformer.wte.weight"]}
    assert all(torch.equal(a, b) for a, b in zip(from_hf(about, bare)[2].values(), from_hf(about, theirs)[2].values(), strict=True))
    with pytest.raises(ValueError, match=r"tensors that a gpt2 of this config.json does not have: lm_head.weight"):
        from_hf(about, theirs | {"lm_head.weight": theirs["transformer.wte.weight"] + 1})


@pytest.mark.promise("Tools", "A value of the wrong type in `config.json` is refused by its key.")
@pytest.mark.parametrize(
    ("name", "change", "culprit"),
    [
        ("llama", {"model_type": "nemotron"}, "nemotron"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "yarn"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "linear"),
        ("gpt_neox", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "gpt_neox"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"hidden_size": True}, "hidden_size"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta"),
        ("llama", {"model_type": ["llama"]}, "model_type"),
        ("llama", {"vocab_size": 10**12}, "vocab_size"),
        ("llama", {"hidden_size": 2**30, "num_attention_heads": 4, "vocab_size": 2**30}, "--hidden-size"),
        ("llama", {"num_key_value_heads": 3}, "--num-query-groups"),
        ("llama", {"num_hidden_layers": 3}, "layers.2"),
        ("llama", {"num_hidden_layers": 1}, "layers.1"),
        ("llama", {"intermediate_size": 128}, "gate_proj"),
        ("mixtral", {"num_experts_per_tok": 5}, "--moe-router-topk"),
        ("olmoe", {"num_local_experts": 5}, "num_local_experts"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "experts"),
    ],
)
def test_other_models_are_refused(name, change, culprit):
    settings = config(name)
    about, theirs = to_hf(settings, VOCABULARY, random_weights(settings))
    with pytest.raises(ValueError, match=culprit):
        from_hf(about | change, theirs)


@pytest.mark.promise("Tools", "`from-hf` and `to-hf` refuse a non-finite weight by name.")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_named_and_refused_both_ways(value):
    settings = config("gpt2")
    weights = random_weights(settings)
    about, theirs = to_hf(settings, VOCABULARY, weights)
    theirs["transformer.h.1.mlp.c_fc.weight"][3, 2] = value
    with pytest.raises(ValueError, match=r"transformer.h.1.mlp.c_fc.weight contains 1 non-finite values .* in float32"):
        from_hf(about, theirs)
    weights[EMBEDDING][0, 0] = 3.4e38  # finite, and beyond BF16
    with pytest.raises(ValueError, match=r"word_embeddings.weight contains 1 non-finite values .* in bfloat16: give a valid model"):
        to_hf(settings, VOCABULARY, weights, torch.bfloat16)


def test_integer_weights_and_damaged_checkpoints_are_refused():
    settings = config("gpt2")
    weights = random_weights(settings)
    about, theirs = to_hf(settings, VOCABULARY, weights)
    with pytest.raises(ValueError, match=r"wpe.weight is torch.int8"):
        from_hf(about, theirs | {"transformer.wpe.weight": torch.zeros(16, 32, dtype=torch.int8)})
    with pytest.raises(ValueError, match=r"missing none, unknown adapter.weight; it is damaged"):
        to_hf(settings, VOCABULARY, weights | {"adapter.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"word_embeddings.weight has shape \(59, 32\), the configuration expects \(60, 32\)"):
        to_hf(settings, VOCABULARY, weights | {EMBEDDING: torch.zeros(59, 32)})
