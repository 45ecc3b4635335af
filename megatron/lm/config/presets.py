"""GPT sizes as data, and quantities computed from a shape: parameters and FLOPs.

125m, 7b, 13b and 175b are table 1 of FP8-LM (the 7B to 175B micro-batches: table 5); 345m and 1.3b are GPT-2's and GPT-3's
shapes with GPT-3's learning rates and batches. All train as in section 3.1.2 of FP8-LM: sequences of 2,048 tokens, betas 0.9 and
0.95, weight decay 0.1, 1,000 iterations of warm-up, cosine decay to a tenth of the learning rate.

olmoe-1b-7b, qwen3-30b-a3b and mixtral-8x7b are mixtures of experts with the shapes published with the weights. OLMoE's learning rate and
losses of the router are from its paper (arXiv:2409.02060). Mixtral's and Qwen3's learning rates were not published, so they are the same
as llama3-8b's, and the coefficients of their auxiliary losses are from the published configurations.

llama2-7b, llama3-8b, llama3-70b and qwen3-8b have the shapes published with the weights, and the sequence length of their pre-training.
The learning rates of the Llama models are from their papers (table 1 of arXiv:2307.09288, table 3 of arXiv:2407.21783); Qwen3's was
not published, so qwen3-8b has llama3-8b's. The other settings equal the settings of the paper's sizes: batches of 4M tokens and 100B tokens
in total, although the authors trained on 2T to 36T. The vocabulary comes from the tokenizer; a dry run without a tokenizer uses the
published size in `VOCABULARIES`.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from megatron.lm.config import Config, ModelConfig

SEQ_LENGTH = 2048
MILLION_TOKENS = 2**20


def _size(
    layers: int,
    hidden: int,
    heads: int,
    *,
    lr: float,
    batch: int,
    tokens: float,
    micro_batch: int,
    tp: int = 1,
    pp: int = 1,
    sequence: int = SEQ_LENGTH,
    **shape: Any,
) -> Mapping[str, Any]:
    """Return the settings of one size; `batch` and `tokens` (of the whole training) in tokens; `shape`: further settings of the model."""
    return MappingProxyType(
        {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "seq_length": sequence,
            "micro_batch_size": micro_batch,
            "global_batch_size": batch // sequence,
            "train_iters": round(tokens / batch),
            "lr": lr,
            "min_lr": round(lr / 10, 12),  # 3e-05, not 2.9999999999999997e-05, wherever it is printed
            "lr_warmup_iters": 1000,
            "lr_decay_style": "cosine",
            "weight_decay": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "sequence_parallel": tp > 1,
            **shape,
        }
    )


def _llama(
    layers: int, hidden: int, heads: int, *, ffn: int, groups: int | None, base: float, sequence: int, lr: float, **rest: Any
) -> Mapping[str, Any]:
    """Return the settings of a size with Llama's layers; `groups`: key and value heads, None if each query head has its own."""
    grouped = {} if groups is None else {"group_query_attention": True, "num_query_groups": groups}
    return _size(
        layers,
        hidden,
        heads,
        sequence=sequence,
        lr=lr,
        batch=4 * MILLION_TOKENS,
        tokens=100e9,
        micro_batch=1,
        ffn_hidden_size=ffn,
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        rotary_base=base,
        **grouped,
        **rest,
    )


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "125m": _size(12, 768, 12, lr=6e-4, batch=MILLION_TOKENS, tokens=100e9, micro_batch=8),
        "345m": _size(24, 1024, 16, lr=3e-4, batch=MILLION_TOKENS // 2, tokens=100e9, micro_batch=8),
        "1.3b": _size(24, 2048, 16, lr=2e-4, batch=MILLION_TOKENS, tokens=100e9, micro_batch=4),
        "7b": _size(32, 4096, 32, lr=3e-4, batch=4 * MILLION_TOKENS, tokens=100e9, micro_batch=2),
        "13b": _size(40, 5120, 40, lr=3e-4, batch=4 * MILLION_TOKENS, tokens=100e9, micro_batch=2, tp=2),
        "175b": _size(96, 12288, 96, lr=3e-5, batch=MILLION_TOKENS, tokens=40e9, micro_batch=1, tp=8, pp=4),
        "llama2-7b": _llama(32, 4096, 32, ffn=11008, groups=None, base=1e4, sequence=4096, lr=3e-4),
        "llama3-8b": _llama(32, 4096, 32, ffn=14336, groups=8, base=5e5, sequence=8192, lr=3e-4),
        "llama3-70b": _llama(80, 8192, 64, ffn=28672, groups=8, base=5e5, sequence=8192, lr=1.5e-4, tp=8, pp=4),
        "qwen3-8b": _llama(36, 4096, 32, ffn=12288, groups=8, base=1e6, sequence=4096, lr=3e-4, norm_epsilon=1e-6, qk_layernorm=True),
        "olmoe-1b-7b": _llama(
            16,
            2048,
            16,
            ffn=1024,
            groups=None,
            base=1e4,
            sequence=4096,
            lr=4e-4,
            qk_layernorm=True,
            qk_layernorm_scope="projection",
            num_experts=64,
            moe_router_topk=8,
            moe_router_pre_softmax=True,
            moe_aux_loss_coeff=0.01,
            moe_z_loss_coeff=0.001,
        ),
        "qwen3-30b-a3b": _llama(
            48,
            2048,
            32,
            ffn=6144,
            groups=4,
            base=1e6,
            sequence=4096,
            lr=3e-4,
            norm_epsilon=1e-6,
            pp=4,
            kv_channels=128,
            qk_layernorm=True,
            num_experts=128,
            moe_router_topk=8,
            moe_ffn_hidden_size=768,
            moe_aux_loss_coeff=0.001,
        ),
        "mixtral-8x7b": _llama(
            32,
            4096,
            32,
            ffn=14336,
            groups=8,
            base=1e6,
            sequence=4096,
            lr=3e-4,
            pp=8,
            num_experts=8,
            moe_router_topk=2,
            moe_aux_loss_coeff=0.02,
        ),
    }
)
GPT2_VOCABULARY = 50257
# Rows of the embedding, as published; not a setting, since the tokenizer determines it. The other sizes use GPT-2's.
VOCABULARIES: Mapping[str, int] = MappingProxyType(
    {
        "llama2-7b": 32000,
        "llama3-8b": 128256,
        "llama3-70b": 128256,
        "qwen3-8b": 151936,
        "olmoe-1b-7b": 50304,
        "qwen3-30b-a3b": 151936,
        "mixtral-8x7b": 32000,
    }
)


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
    return VOCABULARIES.get(name, GPT2_VOCABULARY)


def linear_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of each linear layer of a transformer layer, by slot, for one tensor-parallel rank's part."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
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
