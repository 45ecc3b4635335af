"""Hugging Face architectures that can represent our GPT, as data: keys of config.json, names and layouts of tensors (`layouts`).

Sources: config and modeling files of transformers 4 and 5 for gpt2, gpt_neox, llama, qwen2, qwen3, mixtral, qwen3_moe and olmoe; for our
side megatron-core's GPTModel.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.lm.config import ModelConfig
from megatron.lm.tools.convert.layouts import EMBEDDING, HALVES, HEAD, POSITIONS, QKV, SAME, STACKED_QKV, TRANSPOSED, Architecture, Read

# One function under three names: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). "gelu" is another one (erf).
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")

_WITH_BIASES = {"normalization": "LayerNorm", "swiglu": False, "squared_relu": False, "disable_bias_linear": False, "qk_layernorm": False}

GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    wants=_WITH_BIASES | {"position_embedding_type": "learned_absolute"},
    read={
        "n_layer": ("num_layers", 12),
        "n_embd": ("hidden_size", 768),
        "n_head": ("num_attention_heads", 12),
        "n_inner": ("ffn_size", None),
        "n_positions": ("max_positions", 1024),
        "layer_norm_epsilon": ("norm_epsilon", 1e-5),
        "initializer_range": ("init_method_std", 0.02),
        "embd_pdrop": ("hidden_dropout", 0.1),
        "resid_pdrop": ("hidden_dropout", 0.1),
        "attn_pdrop": ("attention_dropout", 0.1),
        "activation_function": (None, "gelu_new"),
        "tie_word_embeddings": (None, True),
        "vocab_size": (None, 50257),
    },
    fixed={
        "activation_function": TANH_GELU,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    layers="transformer.h.{}.",
    modules={
        "input_layernorm": (("ln_1",), SAME),
        "self_attention.linear_qkv": (("attn.c_attn",), STACKED_QKV),
        "self_attention.linear_proj": (("attn.c_proj",), TRANSPOSED),
        "pre_mlp_layernorm": (("ln_2",), SAME),
        "mlp.linear_fc1": (("mlp.c_fc",), TRANSPOSED),
        "mlp.linear_fc2": (("mlp.c_proj",), TRANSPOSED),
    },
    tops={
        EMBEDDING: "transformer.wte.weight",
        POSITIONS: "transformer.wpe.weight",
        "decoder.final_layernorm.weight": "transformer.ln_f.weight",
        "decoder.final_layernorm.bias": "transformer.ln_f.bias",
        HEAD: "lm_head.weight",
    },
    ignored=r"\.attn\.(masked_)?bias",
)

GPT_NEOX = Architecture(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    wants=_WITH_BIASES | {"position_embedding_type": "rope"},
    read={
        "num_hidden_layers": ("num_layers", 44),
        "hidden_size": ("hidden_size", 6144),
        "num_attention_heads": ("num_attention_heads", 64),
        "intermediate_size": ("ffn_size", 24576),
        "max_position_embeddings": ("max_positions", 2048),
        "layer_norm_eps": ("norm_epsilon", 1e-5),
        "initializer_range": ("init_method_std", 0.02),
        "rotary_emb_base": ("rotary_base", 10000.0),
        "rotary_pct": ("rotary_percent", 0.25),
        "hidden_dropout": ("hidden_dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "hidden_act": (None, "gelu"),
        "use_parallel_residual": (None, True),
        "tie_word_embeddings": (None, False),
        "vocab_size": (None, 50432),
    },
    fixed={"hidden_act": TANH_GELU, "use_parallel_residual": (False,), "attention_bias": (True,)},
    layers="gpt_neox.layers.{}.",
    modules={
        "input_layernorm": (("input_layernorm",), SAME),
        "self_attention.linear_qkv": (("attention.query_key_value",), SAME),  # its heads are [query; key; value] too
        "self_attention.linear_proj": (("attention.dense",), SAME),
        "pre_mlp_layernorm": (("post_attention_layernorm",), SAME),
        "mlp.linear_fc1": (("mlp.dense_h_to_4h",), SAME),
        "mlp.linear_fc2": (("mlp.dense_4h_to_h",), SAME),
    },
    tops={
        EMBEDDING: "gpt_neox.embed_in.weight",
        "decoder.final_layernorm.weight": "gpt_neox.final_layer_norm.weight",
        "decoder.final_layernorm.bias": "gpt_neox.final_layer_norm.bias",
        HEAD: "embed_out.weight",
    },
    ignored=r"\.attention\.(masked_)?bias|\.rotary_emb\.inv_freq",
)


def _adapted(read: Mapping[str, Read], **defaults: Any) -> dict[str, Read]:
    """Return the keys that another architecture reads, with other defaults."""
    return {key: (ours, defaults.get(key, default)) for key, (ours, default) in read.items()}


_ROTATED_SWIGLU = {"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "rotary_percent": 1.0}
_ROTATED_SWIGLU |= {"add_qkv_bias": False}

LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    wants=_ROTATED_SWIGLU | {"qk_layernorm": False},
    read={
        "num_hidden_layers": ("num_layers", 32),
        "hidden_size": ("hidden_size", 4096),
        "num_attention_heads": ("num_attention_heads", 32),
        "num_key_value_heads": ("query_groups", None),
        "head_dim": ("head_size", None),
        "intermediate_size": ("ffn_size", 11008),
        "max_position_embeddings": ("max_positions", 2048),
        "rms_norm_eps": ("norm_epsilon", 1e-6),
        "initializer_range": ("init_method_std", 0.02),
        "rope_theta": ("rotary_base", 10000.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "tie_word_embeddings": (None, False),
        "vocab_size": (None, 32000),
    },
    fixed={"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0,)},
    layers="model.layers.{}.",
    modules={
        "input_layernorm": (("input_layernorm",), SAME),
        "self_attention.linear_qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), QKV),
        "self_attention.linear_proj": (("self_attn.o_proj",), SAME),
        "pre_mlp_layernorm": (("post_attention_layernorm",), SAME),
        "mlp.linear_fc1": (("mlp.gate_proj", "mlp.up_proj"), HALVES),
        "mlp.linear_fc2": (("mlp.down_proj",), SAME),
    },
    tops={
        EMBEDDING: "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        HEAD: "lm_head.weight",
    },
    ignored=r"\.rotary_emb\.inv_freq",
    grouped=True,
    any_width=True,
    biases=("attention_bias", "mlp_bias"),
    scales_rope=True,
)

_READ = {key: read for key, read in LLAMA.read.items() if key not in LLAMA.biases}
_QK_NORMS = {"self_attention.q_layernorm": (("self_attn.q_norm",), SAME), "self_attention.k_layernorm": (("self_attn.k_norm",), SAME)}

# Llama with biases only in its queries, keys and values.
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    wants=_ROTATED_SWIGLU | {"qk_layernorm": False, "disable_bias_linear": True, "add_qkv_bias": True},
    fixed=dict(LLAMA.fixed) | {"use_sliding_window": (False,)},
    read=_adapted(_READ, num_key_value_heads=32, intermediate_size=22016, max_position_embeddings=32768, vocab_size=151936),
    biases=(),
)

# Llama with a norm of the queries and keys of each head.
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    wants=_ROTATED_SWIGLU | {"qk_layernorm": True, "qk_layernorm_scope": "head", "disable_bias_linear": True},
    fixed=dict(LLAMA.fixed) | {"attention_bias": (False,), "use_sliding_window": (False,)},
    read=_adapted(QWEN2.read, head_dim=128) | {"attention_bias": (None, False)},
    modules=dict(LLAMA.modules) | _QK_NORMS,
    biases=(),
)

_SOFTMAX_ROUTER = {
    "moe_shared_expert_intermediate_size": None,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_enable_expert_bias": False,
}
_GATE_UP_DOWN = {
    "fc1_weight": (("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), HALVES),
    "fc2_weight": (("mlp.experts.{}.down_proj",), SAME),
}
_EXPERTS_READ = {"num_experts_per_tok": ("moe_router_topk", 8), "norm_topk_prob": (None, False)}
_ATTENTION = {name: module for name, module in LLAMA.modules.items() if not name.startswith("mlp.")}

# Llama with experts, whose probabilities sum to 1. In transformers 5 the names follow its files, not its modules.
MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    wants=_ROTATED_SWIGLU | _SOFTMAX_ROUTER | {"qk_layernorm": False, "disable_bias_linear": True},
    fixed=dict(LLAMA.fixed) | {"sliding_window": (None,), "attention_bias": (False,), "router_jitter_noise": (0.0,)},
    read=_adapted(_READ, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1000000.0)
    | {"intermediate_size": ("expert_size", 14336), "num_local_experts": ("num_experts", 8), "num_experts_per_tok": ("moe_router_topk", 2)},
    modules=_ATTENTION,
    biases=(),
    router="block_sparse_moe.gate",
    experts={
        "fc1_weight": (("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"), HALVES),
        "fc2_weight": (("block_sparse_moe.experts.{}.w2",), SAME),
    },
)

# Qwen3 with experts in some layers or in all.
QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    wants=dict(QWEN3.wants) | _SOFTMAX_ROUTER,
    read=_adapted(QWEN2.read, num_hidden_layers=24, hidden_size=2048, num_key_value_heads=4, intermediate_size=6144)
    | _EXPERTS_READ
    | {"moe_intermediate_size": ("expert_size", 768), "num_experts": ("num_experts", 128), "decoder_sparse_step": (None, 1)},
    router="mlp.gate",
    experts=_GATE_UP_DOWN,
    top_k_normalized="norm_topk_prob",
    dense_layers="mlp_only_layers",
    period="decoder_sparse_step",
)

_OLMOE = _adapted(
    _READ, rms_norm_eps=1e-5, num_hidden_layers=16, hidden_size=2048, num_attention_heads=16, max_position_embeddings=4096, vocab_size=50304
)

# Experts, and a norm of the queries and keys of all heads together; a token's probabilities need not sum to 1.
OLMOE = replace(
    LLAMA,
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    wants=_ROTATED_SWIGLU | _SOFTMAX_ROUTER | {"qk_layernorm": True, "qk_layernorm_scope": "projection", "disable_bias_linear": True},
    fixed=dict(LLAMA.fixed) | {"clip_qkv": (None,), "attention_bias": (False,)},
    read={key: read for key, read in _OLMOE.items() if key != "head_dim"}
    | _EXPERTS_READ
    | {"intermediate_size": ("expert_size", 2048), "num_experts": ("num_experts", 64)},
    modules=_ATTENTION | _QK_NORMS,
    any_width=False,
    biases=(),
    router="mlp.gate",
    experts=_GATE_UP_DOWN,
    top_k_normalized="norm_topk_prob",
)

ARCHITECTURES = {one.model_type: one for one in (GPT2, GPT_NEOX, LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, OLMOE)}


def architecture_of(model: ModelConfig) -> Architecture:
    """Return the architecture that supports `model`.

    Raises:
        ValueError: none does; the message names the unsupported settings of each that has experts or not, as the model.
    """
    alike = {name: one for name, one in ARCHITECTURES.items() if bool(one.experts) == (model.num_experts is not None)}
    misfits = {name: one.misfits(model) for name, one in alike.items()}
    for name, unsupported in misfits.items():
        if not unsupported:
            return ARCHITECTURES[name]
    reasons = "; ".join(f"{name} does not support {', '.join(unsupported)}" for name, unsupported in misfits.items())
    raise ValueError(
        f"no supported Hugging Face architecture can represent this model: {reasons}. export-bf16 writes any model under our own names"
    )
