"""Hugging Face architectures that can represent our GPT, as data: keys of config.json, names and layouts of tensors.

Sources: config and modeling files of transformers 4 and 5 for gpt2, gpt_neox, llama, qwen2 and qwen3; for our side megatron-core's
    GPTModel.
Its `linear_qkv` contains, for each query group, its query heads, then key, then value, and its `linear_fc1` under SwiGLU is [gate; up].
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.lm.config import ModelConfig, flag

EMBEDDING, POSITIONS, HEAD = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.weight"
LARGEST_TENSOR = 2**45  # elements
LARGEST = 2**31  # no setting reaches it: a larger size means a damaged file
# One function under three names: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). "gelu" is another one (erf).
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


@dataclass(frozen=True)
class Layout:
    """How one of our tensors is laid out as one or more of theirs; both directions only move elements.

    split: (model, our tensor) -> their tensors. join: (model, their tensors) -> our tensor. Any dtype.
    """

    split: Callable[[ModelConfig, Tensor], list[Tensor]]
    join: Callable[[ModelConfig, list[Tensor]], Tensor]


def _split_qkv(model: ModelConfig, x: Tensor) -> list[Tensor]:
    queries = model.num_attention_heads // model.query_groups
    rows = x.unflatten(0, (model.query_groups, queries + 2, model.head_size))
    return [part.flatten(0, 2) for part in rows.split([queries, 1, 1], dim=1)]


def _join_qkv(model: ModelConfig, parts: list[Tensor]) -> Tensor:
    return torch.cat([part.unflatten(0, (model.query_groups, -1, model.head_size)) for part in parts], dim=1).flatten(0, 2)


def _split_stacked_qkv(model: ModelConfig, x: Tensor) -> list[Tensor]:
    return [torch.cat(_split_qkv(model, x)).t()]


def _join_stacked_qkv(model: ModelConfig, parts: list[Tensor]) -> Tensor:
    return _join_qkv(model, list(parts[0].t().chunk(3)))


def _join_halves(model: ModelConfig, parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)


SAME = Layout(lambda model, x: [x], lambda model, parts: parts[0])
TRANSPOSED = Layout(lambda model, x: [x.t()], lambda model, parts: parts[0].t())  # transformers' Conv1D is [in, out]; `t` leaves vectors
HALVES = Layout(lambda model, x: list(x.chunk(2)), _join_halves)
QKV = Layout(_split_qkv, _join_qkv)
STACKED_QKV = Layout(_split_stacked_qkv, _join_stacked_qkv)


@dataclass(frozen=True)
class Rule:
    """One of our tensors and its counterparts.

    Attributes:
        ours: its name in the state dict of a model on one process.
        shape: its shape, the vocabulary not padded.
        theirs: names of its counterparts.
        linear: whether it is the weight of a linear layer inside a transformer layer, which FP8 inference quantizes.
    """

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    layout: Layout
    model: ModelConfig
    linear: bool = False

    def split(self, x: Tensor) -> list[Tensor]:
        """Our tensor -> theirs, contiguous."""
        return [part.contiguous() for part in self.layout.split(self.model, x)]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Their tensors -> ours, contiguous."""
        return self.layout.join(self.model, parts).contiguous()

    def their_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of its counterparts; ValueError if no memory could hold the tensor."""
        if math.prod(self.shape) > LARGEST_TENSOR:
            raise ValueError(f"{', '.join(self.theirs)} would be {' x '.join(map(str, self.shape))}: config.json is damaged")
        return [tuple(part.shape) for part in self.split(torch.empty(self.shape, device="meta"))]


@dataclass(frozen=True)
class Architecture:
    """One `model_type` of transformers.

    Attributes:
        class_name: for "architectures" in config.json.
        wants: settings that our model must have.
        keys: key of config.json -> field or property of ModelConfig with the same value.
        fixed: key of config.json -> values with which it computes the same as our model; the first one is written.
        defaults: transformers' default for a key that is missing in config.json.
        layers: prefix of a layer's tensors, with a placeholder for the layer's number.
        modules: our module in a layer -> their modules and the layout.
        tops: our tensor outside the layers -> their name.
        ignored: regular expression of tensors that are not weights (masks, frequencies).
        grouped: whether it supports query groups and heads of any width.
        biases: keys for whether its linear layers have biases; all equal in our models.
        scales_rope: whether `rope_scaling` in config.json may scale the rotary embedding.
    """

    model_type: str
    class_name: str
    wants: Mapping[str, Any]
    keys: Mapping[str, str]
    fixed: Mapping[str, tuple[Any, ...]]
    defaults: Mapping[str, Any]
    layers: str
    modules: Mapping[str, tuple[tuple[str, ...], Layout]]
    tops: Mapping[str, str]
    ignored: str
    grouped: bool = False
    biases: tuple[str, ...] = ()
    scales_rope: bool = False

    @property
    def types(self) -> dict[str, type]:
        """Key of config.json that is read -> the type of its value; null means derived from other keys."""
        derived = {key: int for key, value in self.defaults.items() if value is None}
        return {key: type(value) for key, value in self.defaults.items() if value is not None} | derived

    def judge(self, key: str, value: Any) -> None:
        """Raise a ValueError if a value of config.json does not have the type of `key`."""
        expected = self.types[key]
        if value is None and self.defaults[key] is None:
            return
        whole = type(value) is expected or (expected is float and type(value) is int)
        if not whole or (expected in (int, float) and not abs(value) < LARGEST):
            names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
            raise ValueError(f"config.json has {key} = {str(value)[:60]!r}: it must be {names[expected]}")

    def misfits(self, model: ModelConfig) -> list[str]:
        """Return the settings of `model` that this architecture does not support, as flags."""
        bad = [f"{flag(key)} {getattr(model, key)}" for key, value in self.wants.items() if getattr(model, key) != value]
        heads, hidden = model.num_attention_heads, model.hidden_size
        if not self.scales_rope:
            bad += [flag(name) for name in ("use_rope_scaling", "rotary_seq_len_interpolation_factor") if getattr(model, name)]
        if not self.grouped and model.query_groups != heads:
            bad.append(f"--num-query-groups {model.query_groups}")
        if hidden % heads or (not self.grouped and model.head_size != hidden // heads):
            bad.append(f"--kv-channels {model.head_size} with --hidden-size {hidden}")
        return bad

    def rules(self, model: ModelConfig, vocab_size: int) -> Iterator[Rule]:
        """Yield one rule per tensor of our model."""
        hidden = model.hidden_size
        shapes = {EMBEDDING: (vocab_size, hidden), HEAD: (vocab_size, hidden), POSITIONS: (model.max_positions, hidden)}
        for ours, theirs in self.tops.items():
            if ours != HEAD or model.untie_embeddings_and_output_weights:
                yield Rule(ours, shapes.get(ours, (hidden,)), (theirs,), SAME, model)
        in_layer = _layer_shapes(model)
        for number in range(model.num_layers):
            for module, (theirs_modules, layout) in self.modules.items():
                for name, shape in in_layer[module].items():
                    theirs_names = tuple(f"{self.layers.format(number)}{one}.{name}" for one in theirs_modules)
                    ours = f"decoder.layers.{number}.{module}.{name}"
                    yield Rule(ours, shape, theirs_names, layout, model, linear=len(shape) == 2)


def _layer_shapes(model: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return, for each module of a layer, {weight or bias: shape}."""
    hidden, ffn, queries = model.hidden_size, model.ffn_size, model.num_attention_heads * model.head_size
    linears = {
        "self_attention.linear_qkv": (queries + 2 * model.query_groups * model.head_size, hidden),
        "self_attention.linear_proj": (hidden, queries),
        "mlp.linear_fc1": (2 * ffn if model.swiglu else ffn, hidden),
        "mlp.linear_fc2": (hidden, ffn),
    }
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in linears.items():
        bias = model.qkv_bias if name.endswith("qkv") else not model.disable_bias_linear
        shapes[name] = {"weight": shape, "bias": shape[:1]} if bias else {"weight": shape}
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        shapes[name] = {"weight": (hidden,)} if model.normalization == "RMSNorm" else {"weight": (hidden,), "bias": (hidden,)}
    for name in ("self_attention.q_layernorm", "self_attention.k_layernorm"):
        shapes[name] = {"weight": (model.head_size,)}
    return shapes


_WITH_BIASES = {"normalization": "LayerNorm", "swiglu": False, "squared_relu": False, "disable_bias_linear": False, "qk_layernorm": False}

GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    wants=_WITH_BIASES | {"position_embedding_type": "learned_absolute"},
    keys={
        "n_layer": "num_layers",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "ffn_size",
        "n_positions": "max_positions",
        "layer_norm_epsilon": "norm_epsilon",
        "initializer_range": "init_method_std",
        "embd_pdrop": "hidden_dropout",
        "resid_pdrop": "hidden_dropout",
        "attn_pdrop": "attention_dropout",
    },
    fixed={
        "activation_function": TANH_GELU,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    defaults={
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_inner": None,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "vocab_size": 50257,
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
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "intermediate_size": "ffn_size",
        "max_position_embeddings": "max_positions",
        "layer_norm_eps": "norm_epsilon",
        "initializer_range": "init_method_std",
        "rotary_emb_base": "rotary_base",
        "rotary_pct": "rotary_percent",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
    },
    fixed={"hidden_act": TANH_GELU, "use_parallel_residual": (False,), "attention_bias": (True,)},
    defaults={
        "num_hidden_layers": 44,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "rotary_emb_base": 10000.0,
        "rotary_pct": 0.25,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
        "vocab_size": 50432,
    },
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

_ROTATED_SWIGLU = {"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "rotary_percent": 1.0}
_ROTATED_SWIGLU |= {"add_qkv_bias": False}

LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    wants=_ROTATED_SWIGLU | {"qk_layernorm": False},
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "query_groups",
        "head_dim": "head_size",
        "intermediate_size": "ffn_size",
        "max_position_embeddings": "max_positions",
        "rms_norm_eps": "norm_epsilon",
        "initializer_range": "init_method_std",
        "rope_theta": "rotary_base",
        "attention_dropout": "attention_dropout",
    },
    fixed={"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0,)},
    defaults={
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
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
    biases=("attention_bias", "mlp_bias"),
    scales_rope=True,
)

# Llama with biases only in its queries, keys and values.
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    wants=_ROTATED_SWIGLU | {"qk_layernorm": False, "disable_bias_linear": True, "add_qkv_bias": True},
    fixed=dict(LLAMA.fixed) | {"use_sliding_window": (False,)},
    defaults={
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": None,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    biases=(),
)

# Llama with a norm of the queries and keys of each head.
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    wants=_ROTATED_SWIGLU | {"qk_layernorm": True, "disable_bias_linear": True},
    fixed=dict(LLAMA.fixed) | {"attention_bias": (False,), "use_sliding_window": (False,)},
    defaults={
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    modules=dict(LLAMA.modules)
    | {
        "self_attention.q_layernorm": (("self_attn.q_norm",), SAME),
        "self_attention.k_layernorm": (("self_attn.k_norm",), SAME),
    },
    biases=(),
)

ARCHITECTURES = {one.model_type: one for one in (GPT2, GPT_NEOX, LLAMA, QWEN2, QWEN3)}


def architecture_of(model: ModelConfig) -> Architecture:
    """Return the architecture that supports `model`.

    Raises:
        ValueError: none does; the message names the unsupported settings of each.
    """
    if model.num_experts is not None:
        raise ValueError("the model is a mixture of experts, and no Hugging Face architecture here has experts yet: export a dense model")
    misfits = {name: one.misfits(model) for name, one in ARCHITECTURES.items()}
    for name, unsupported in misfits.items():
        if not unsupported:
            return ARCHITECTURES[name]
    reasons = "; ".join(f"{name} does not support {', '.join(unsupported)}" for name, unsupported in misfits.items())
    raise ValueError(
        f"no supported Hugging Face architecture can represent this model: {reasons}. export-bf16 writes any model under our own names"
    )
