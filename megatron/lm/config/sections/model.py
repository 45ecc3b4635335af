"""The shape of the GPT."""

from dataclasses import dataclass

from megatron.lm.config.sections.schema import COUNT, POSITIVE, PROBABILITY, SIZE, Interval, setting

# This package has no wheel for this torch and was never run here: the name is refused with a reason.
FLASH_ATTENTION_PACKAGE = "flash-attn"
ATTENTION_BACKENDS = ("auto", "cudnn", "flash", "math", FLASH_ATTENTION_PACKAGE)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the GPT."""

    num_layers: int = setting("transformer layers", legal=Interval(1, 10_000))
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
    qk_layernorm: bool = setting(
        "normalize the queries and keys of each head before the rotary embedding (Qwen3); such layers are not fused", False
    )
    position_embedding_type: str = setting(
        "how the model encodes positions; none: only by causal attention", "rope", choices=("rope", "learned_absolute", "none")
    )
    rotary_base: float = setting("base of the rotary embedding's wavelengths", 10000.0, legal=POSITIVE)
    rotary_percent: float = setting("share of a head's width that is rotated", 1.0, legal=Interval(0, 1, low_open=True))
    rotary_seq_len_interpolation_factor: float | None = setting(
        "divide positions by this before the rotary embedding, for longer sequences (linear interpolation); derived: 1",
        None,
        legal=POSITIVE,
    )
    use_rope_scaling: bool = setting("lengthen the rotary embedding's long wavelengths as Llama 3.1 does beyond 8,192 tokens", False)
    rope_scaling_factor: float = setting("factor of --use-rope-scaling for the longest wavelengths", 8.0, legal=Interval(1, 1e6))
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
        "kernel of the attention core; on a GPU auto tries cuDNN, then flash; both come with PyTorch", "auto", choices=ATTENTION_BACKENDS
    )

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
    def max_positions(self) -> int:
        """Longest sequence that the position embedding supports, in tokens."""
        return self.max_position_embeddings or self.seq_length
