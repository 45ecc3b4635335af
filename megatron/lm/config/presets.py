"""GPT sizes by name, from `presets.toml`, and quantities computed from a shape: parameters and FLOPs."""

import tomllib
from collections.abc import Collection, Mapping
from importlib import resources
from typing import Any

from megatron.lm.config import ModelConfig, ParallelConfig

GPT2_VOCABULARY = 50257

_FILE = tomllib.loads(resources.files("megatron.lm.config").joinpath("presets.toml").read_text(encoding="utf-8"))
_SIZES = {name: _FILE["all"] | _FILE.get(size.get("like"), {}) | size for name, size in _FILE["sizes"].items()}
# Settings by field name (over all sections of `Config`) by size.
PRESETS = {name: {key: x for key, x in size.items() if key not in ("like", "vocabulary")} for name, size in _SIZES.items()}


def preset(name: str) -> dict[str, Any]:
    """Return the settings of a size, by field name (over all sections of `Config`). ValueError with all names if it is unknown."""
    if name not in PRESETS:
        raise ValueError(f"--preset {name!r} is unknown: choose one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])


def in_other_units(values: Mapping[str, Any], flags: Collection[str]) -> dict[str, Any]:
    """Return the settings of a size without those that `flags` (with hyphens) give in another unit.

    With `--train-samples` the warm-up counts samples too, and the size has no length of its own. `--lr-warmup-fraction` replaces the
    warm-up.
    """
    kept = dict(values)
    if "--train-samples" in flags:
        kept.pop("train_iters")
        kept["lr_warmup_samples"] = kept.pop("lr_warmup_iters") * values["global_batch_size"]
    if "--lr-warmup-fraction" in flags:
        kept = {name: value for name, value in kept.items() if name not in ("lr_warmup_iters", "lr_warmup_samples")}
    return kept


def published_vocabulary(name: str) -> int:
    """Return the published number of embedding rows of a size, not padded."""
    return _SIZES.get(name, {}).get("vocabulary", GPT2_VOCABULARY)


def linear_shapes(model: ModelConfig, parallel: ParallelConfig) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of each linear layer of a transformer layer, by slot, for one tensor-parallel rank's part."""
    tp = parallel.tensor_model_parallel_size
    hidden, ffn = model.hidden_size, model.ffn_size // tp
    queries, keys = model.num_attention_heads * model.head_size // tp, model.query_groups * model.head_size // tp
    return {
        "linear_qkv": (queries + 2 * keys, hidden),
        "linear_proj": (hidden, queries),
        "linear_fc1": (ffn * (2 if model.swiglu else 1), hidden),
        "linear_fc2": (hidden, ffn),
    }


def parameter_count(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters of the whole GPT with `vocab_size` embedding rows (the padded vocabulary)."""
    return _parameters(model, vocab_size, model.num_experts or 0)


def active_parameter_count(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters that compute one token: of a mixture of experts, the router and top-k experts in place of all.
    Arguments as `parameter_count`."""
    return _parameters(model, vocab_size, model.moe_router_topk if model.num_experts is not None else 0)


def _parameters(model: ModelConfig, vocab_size: int, experts: int) -> int:
    """`parameter_count` with this number of experts in each layer that is a mixture of experts."""
    hidden, biases = model.hidden_size, not model.disable_bias_linear
    queries = model.num_attention_heads * model.head_size
    qkv = queries + 2 * model.query_groups * model.head_size
    attention = hidden * (qkv + queries) + biases * hidden + model.qkv_bias * qkv
    mixtures, shared = len(model.moe_layers), model.moe_shared_expert_intermediate_size
    mixture = hidden * (model.num_experts or 0) + experts * _mlp(model, model.expert_size) + (_mlp(model, shared) if shared else 0)
    mlps = (model.num_layers - mixtures) * _mlp(model, model.ffn_size) + mixtures * mixture
    norm = hidden if model.normalization == "RMSNorm" else 2 * hidden
    heads = (1 if model.normalization == "RMSNorm" else 2) * sum(model.qk_norm_sizes or ())
    embeddings = vocab_size * (2 if model.untie_embeddings_and_output_weights else 1)
    positions = model.max_positions if model.position_embedding_type == "learned_absolute" else 0
    return model.num_layers * (attention + 2 * norm + heads) + mlps + norm + hidden * (embeddings + positions)


def _mlp(model: ModelConfig, ffn: int) -> int:
    """Return the number of parameters of an MLP of width `ffn`."""
    fc1 = 2 * ffn if model.swiglu else ffn
    return model.hidden_size * (fc1 + ffn) + (not model.disable_bias_linear) * (fc1 + model.hidden_size)


def flops_per_token(model: ModelConfig, vocab_size: int) -> int:
    """Return the forward and backward FLOPs per token: 6 per parameter that computes it, plus 6 x layers x width x sequence for causal
    attention (encoder: 12).

    An embedding lookup is not a matrix product: position embeddings, and an input embedding that is not also the LM head, do not count.
    Attention has two products, 2 FLOPs each, over half of the sequence on average (encoder: all of it), and twice as many in backward.
    Recomputed layers are not counted (model FLOPs, as in MFU). `vocab_size` as in `parameter_count`.
    """
    seen = 1 if model.objective == "causal-lm" else 2
    attention = 6 * seen * model.num_layers * model.num_attention_heads * model.head_size * model.seq_length
    untied = vocab_size if model.untie_embeddings_and_output_weights else 0
    positions = model.max_positions if model.position_embedding_type == "learned_absolute" else 0
    return 6 * (active_parameter_count(model, vocab_size) - model.hidden_size * (untied + positions)) + attention
