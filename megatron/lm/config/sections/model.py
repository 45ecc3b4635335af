"""The shape of the GPT."""

import ast
from dataclasses import dataclass

from megatron.lm.config.sections.schema import COUNT, NON_NEGATIVE, POSITIVE, PROBABILITY, SIZE, Range, setting


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the GPT."""

    num_layers: int = setting("transformer layers", legal=Range(1, 10_000))
    hidden_size: int = setting("width of the residual stream", legal=SIZE)
    num_attention_heads: int = setting("query heads of an attention layer", legal=SIZE)
    seq_length: int = setting("tokens in a training sequence", legal=SIZE)
    ffn_hidden_size: int | None = setting("width of the MLP; derived: 4 x hidden, with --swiglu 8/3 x hidden", None, legal=SIZE)
    group_query_attention: bool = setting("share key and value heads between query heads (GQA)", False)
    num_query_groups: int | None = setting("key and value heads with --group-query-attention; derived: 1", None, legal=SIZE)
    kv_channels: int | None = setting("width of one head; derived: hidden size / heads", None, legal=SIZE)
    max_position_embeddings: int | None = setting("longest sequence that the positions support; derived: seq length", None, legal=SIZE)
    vocab_size: int | None = setting("vocabulary size of NullTokenizer; other tokenizers have their own", None, legal=COUNT)
    make_vocab_size_divisible_by: int = setting("pad the vocabulary to a multiple of this x tensor-parallel size", 128, legal=SIZE)
    normalization: str = setting("norm layers", "LayerNorm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = setting("epsilon of the norm layers", 1e-5, legal=POSITIVE)
    swiglu: bool = setting("SwiGLU in the MLP instead of GELU", False)
    squared_relu: bool = setting("squared ReLU in the MLP instead of GELU", False)
    disable_bias_linear: bool = setting("linear layers without bias", False)
    add_qkv_bias: bool = setting("a bias in the QKV layer, even with --disable-bias-linear (Qwen2)", False)
    qk_layernorm: bool = setting("normalize queries and keys before the rotary embedding", False)
    qk_layernorm_scope: str = setting(
        "what --qk-layernorm normalizes: queries and keys of each head (Qwen3), or of all heads together (OLMoE), which is not fused",
        "head",
        choices=("head", "projection"),
    )
    position_embedding_type: str = setting(
        "how the model encodes positions; none: only by causal attention", "rope", choices=("rope", "learned_absolute", "none")
    )
    rotary_base: float = setting("base of the rotary embedding's wavelengths", 10000.0, legal=POSITIVE)
    rotary_percent: float = setting("share of a head's width that is rotated", 1.0, legal=Range(0, 1, low_open=True))
    rotary_seq_len_interpolation_factor: float | None = setting(
        "divide positions by this before the rotary embedding, for longer sequences (linear interpolation); derived: 1",
        None,
        legal=POSITIVE,
    )
    use_rope_scaling: bool = setting("lengthen the rotary embedding's long wavelengths as Llama 3.1 does beyond 8,192 tokens", False)
    rope_scaling_factor: float = setting("factor of --use-rope-scaling for the longest wavelengths", 8.0, legal=Range(1, 1e6))
    untie_embeddings_and_output_weights: bool = setting("give the LM head its own weight", False)
    objective: str = setting(
        "what the model predicts: the next token, with causal attention (GPT), or masked tokens, with bidirectional attention (BERT, as "
        "RoBERTa trains it)",
        "causal-lm",
        choices=("causal-lm", "masked-lm"),
    )
    init_method_std: float = setting("standard deviation of the initial weights", 0.02, legal=POSITIVE)
    hidden_dropout: float = setting("dropout on the residual stream", 0.0, legal=PROBABILITY)
    attention_dropout: float = setting("dropout on the attention weights", 0.0, legal=PROBABILITY)
    attention_backend: str = setting(
        "kernel of the attention core; on a GPU auto tries cuDNN, then flash; both come with PyTorch",
        "auto",
        choices=("auto", "cudnn", "flash", "math"),
    )

    # Mixture of experts, with Megatron-LM's names.
    num_experts: int | None = setting("experts of a mixture-of-experts layer (MoE); derived: no such layers", None, legal=Range(2, 4096))
    moe_layer_freq: str = setting(
        "which layers are mixtures of experts: every Nth from the first, or a list with 0 for a dense layer, such as ([0]*1+[1]*15)", "1"
    )
    moe_ffn_hidden_size: int | None = setting("width of one expert; derived: width of the MLP", None, legal=SIZE)
    moe_shared_expert_intermediate_size: int | None = setting(
        "width of a shared expert, which every token goes to; derived: none", None, legal=SIZE
    )
    moe_router_topk: int = setting("experts that each token goes to", 2, legal=Range(1, 4096))
    moe_router_score_function: str = setting(
        "the router's scores: softmax, or sigmoid divided by the sum over a token's experts", "softmax", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = setting(
        "softmax over all experts, instead of only over a token's; its probabilities then sum to less than 1", False
    )
    moe_router_topk_scaling_factor: float | None = setting(
        "multiply the probabilities of a token's experts by this; derived: 1", None, legal=POSITIVE
    )
    moe_router_num_groups: int | None = setting("groups of experts of which a token may only use some", None, legal=Range(1, 4096))
    moe_router_group_topk: int | None = setting(
        "groups that a token may use, those with the highest sum of their best scores", None, legal=Range(1, 4096)
    )
    moe_router_dtype: str = setting("dtype of the router's product, scores and losses", "fp32", choices=("fp32",))
    moe_router_load_balancing_type: str = setting(
        "auxiliary loss that balances the experts: of a micro-batch (aux_loss), of each sequence (seq_aux_loss), or none",
        "aux_loss",
        choices=("aux_loss", "seq_aux_loss", "none"),
    )
    moe_aux_loss_coeff: float = setting("coefficient of the auxiliary loss", 0.0, legal=NON_NEGATIVE)
    moe_z_loss_coeff: float | None = setting(
        "coefficient of the squared log-sum-exp of the router's logits; derived: no such loss", None, legal=NON_NEGATIVE
    )
    moe_router_enable_expert_bias: bool = setting(
        "balance the experts by a bias on their scores, which selects a token's experts but does not weight them (DeepSeek-V3)", False
    )
    moe_router_bias_update_rate: float = setting("step of the expert bias after each iteration", 1e-3, legal=POSITIVE)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers, from 0, that are mixtures of experts. ValueError for an invalid `--moe-layer-freq`."""
        if self.num_experts is None:
            return ()
        return tuple(n for n, experts in enumerate(layer_pattern(self.moe_layer_freq, self.num_layers)) if experts)

    @property
    def expert_size(self) -> int:
        """Width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def activation(self) -> str:
        """The MLP's activation: one of `msamp.kernels.reference.activate.KINDS`."""
        return "swiglu" if self.swiglu else "squared-relu" if self.squared_relu else "gelu"

    @property
    def qkv_bias(self) -> bool:
        """Whether the QKV layer has a bias."""
        return self.add_qkv_bias or not self.disable_bias_linear

    @property
    def ffn_size(self) -> int:
        """Width of the MLP. SwiGLU's three matrices at 8/3 h (rounded down to a multiple of 64, as in Megatron-LM) are as large as two at
        4h."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return max(64, self.hidden_size * 8 // 3 // 64 * 64) if self.swiglu else 4 * self.hidden_size

    @property
    def query_groups(self) -> int:
        """Key and value heads of an attention layer."""
        return (self.num_query_groups or 1) if self.group_query_attention else self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def qk_norm_sizes(self) -> tuple[int, int] | None:
        """Width of the norms of queries and of keys; None without them."""
        if not self.qk_layernorm:
            return None
        whole = self.qk_layernorm_scope == "projection"
        return self.head_size * (self.num_attention_heads if whole else 1), self.head_size * (self.query_groups if whole else 1)

    def padded_vocab_size(self, vocab_size: int, tensor_parallel: int) -> int:
        """Round `vocab_size` up to a multiple of make_vocab_size_divisible_by x TP: rows of the embedding."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel
        return -(-vocab_size // multiple) * multiple

    @property
    def max_positions(self) -> int:
        """Longest sequence that the position embedding supports, in tokens."""
        return self.max_position_embeddings or self.seq_length


def layer_pattern(text: str, layers: int) -> tuple[bool, ...]:
    """Return which of `layers` layers are mixtures of experts.

    Args:
        text: Megatron-LM's `--moe-layer-freq`: N for every Nth layer from the first, or a list of 0 and 1, written with + and * or without.
        layers: in the whole model.

    Raises:
        ValueError: for any other `text`, or a list without one number per layer.
    """
    given = f"--moe-layer-freq {text}"
    try:
        pattern = _evaluated(ast.parse(text.strip(), mode="eval").body, layers)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pattern = None
    if isinstance(pattern, int):
        if pattern < 1:
            raise ValueError(f"{given}: give a number of at least 1, or a list of 0 and 1 such as ([0]*1+[1]*{max(1, layers - 1)})")
        return tuple(n % pattern == 0 for n in range(layers))
    if pattern is None or not set(pattern) <= {0, 1}:
        raise ValueError(f"{given} is not valid: give a number N, or a list of 0 and 1 such as ([0]*1+[1]*{max(1, layers - 1)})")
    if len(pattern) != layers:
        raise ValueError(f"{given} has {len(pattern)} entries for --num-layers {layers}: give one 0 or 1 per layer")
    return tuple(bool(one) for one in pattern)


def _evaluated(node: ast.expr, longest: int) -> int | list[int]:
    """Evaluate integers, lists of them, list + list and list * integer; ValueError for anything else, and for lists far beyond
    `longest`."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.List(elts=elements):
            values = [_evaluated(element, longest) for element in elements]
            if all(isinstance(value, int) for value in values):
                return values  # type: ignore[return-value]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as op, right=right):
            one, other = _evaluated(left, longest), _evaluated(right, longest)
            if isinstance(op, ast.Add) and isinstance(one, list) and isinstance(other, list):
                return one + other
            if isinstance(op, ast.Mult) and isinstance(one, list) != isinstance(other, list):
                part, times = (one, other) if isinstance(one, list) else (other, one)
                if len(part) * max(0, times) <= 2 * longest + 1:  # type: ignore[arg-type, call-overload, operator]
                    return part * times  # type: ignore[operator]
    raise ValueError
