"""Core attention with torch's scaled_dot_product_attention: no s x s matrix in memory, and the fastest kernel of this machine."""

import functools
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.lm.config import ModelConfig, ParallelConfig
from megatron.lm.config.sections.parallel import CP_COMM_TYPES
from megatron.lm.processes import process_groups
from megatron.lm.processes.grid import Grid
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.kernels.fp8_attention import check_width, default_scale, prepare
from msamp.nn.fp8_attention import AttentionScaling, FP8Attention, gradient_parts
from msamp.nn.unfused import RotaryFunction
from msamp.numerics.recipe import Gemms
from msamp.parallel.fp8_head_exchange import FP8HeadExchange
from msamp.parallel.fp8_ring_attention import FP8RingAttention, shapes
from msamp.parallel.head_exchange import HeadExchange
from msamp.parallel.ring_attention import RingAttention

BACKENDS: dict[str, list[SDPBackend]] = {
    # cuDNN before flash: 0.145 ms against 0.27 forward, 0.49 against 0.89 backward (4 x 16 x 2048 x 128, causal, H200).
    "auto": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "math": [SDPBackend.MATH],
}
NO_MASK = "FP8 attention got a mask, a bias or packed sequences, which are not supported; pass None"
# For a mask of s x s: flash takes none, and memory-efficient attention takes any.
MASKED_BACKENDS = {"auto": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]}


def check_backend(backend: str, dropout: float = 0.0) -> None:
    """Raise a ValueError if `--attention-backend` is unknown or not available on this machine."""
    if backend == "flash" and dropout and not torch.cuda.is_available():
        raise ValueError(f"--attention-backend flash does not support --attention-dropout ({dropout:g}) on a CPU; choose auto or math")
    if backend not in BACKENDS:
        raise ValueError(f"--attention-backend {backend}: choose one of {', '.join(BACKENDS)}")
    if backend == "cudnn" and not torch.backends.cudnn.is_available():
        raise ValueError("--attention-backend cudnn: this machine has no cuDNN; choose auto, flash or math")


def document_mask(documents: Tensor, *, causal: bool, dtype: torch.dtype) -> Tensor:
    """Return a mask with which tokens attend only to their own document.

    All layers of a micro-batch share it, and attention's backward keeps it: b s^2 numbers. It is additive since torch would convert a
    Boolean mask in every layer, and keep each copy.

    Args:
        documents: [b, s] int, the same number for tokens of the same document.
        causal: whether tokens attend to earlier tokens only.
        dtype: of the queries.

    Returns:
        [b, 1, s, s]: 0 where a query (third dimension) attends to a key (fourth), and otherwise -inf.
    """
    attends = documents[:, None, :, None] == documents[:, None, None, :]
    if causal:
        attends = attends.tril()
    return torch.full(attends.shape, -torch.inf, dtype=dtype, device=attends.device).masked_fill_(attends, 0)


def prepare_fp8(model: ModelConfig, parallel: ParallelConfig, micro_batch_size: int) -> None:
    """Prepare the kernels of `--attention-precision fp8` for the shape of a rank's part of a micro-batch.

    Raises:
        ValueError: this machine does not support FP8 attention of this shape.
    """
    tp, cp, causal = parallel.tensor_model_parallel_size, parallel.context_parallel_size, model.objective == "causal-lm"
    if parallel.shares_heads:  # fewer heads of whole sequences
        tp, cp = tp * cp, 1
    rest = (micro_batch_size, model.num_attention_heads // tp, model.head_size)
    groups, scale, device = max(1, model.query_groups // tp), default_scale(model.head_size), process_groups.device()
    try:
        for queries, keys, masked in sorted(shapes(model.seq_length // cp, cp, causal=causal)):
            prepare((queries, *rest), groups, scale, device, causal=masked, keys=keys, gradients=False)
            for few, of_keys, diagonal in gradient_parts(queries, keys, causal=masked):
                size = (few.stop - few.start, *rest)
                prepare(size, groups, scale, device, causal=diagonal, keys=of_keys.stop - of_keys.start, gradients=True)
    except ValueError as error:
        raise ValueError(f"--attention-precision fp8: {error}") from error


# Keyed by the angles, and freed with them: a model keeps the angles of each sequence length, so that CUDA graphs find the tables at the
# same address. Full recomputation creates new angles per unit, and these tables are freed with the unit.
_TABLES = WeakTensorKeyDictionary()


def cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, FP32 [s, r] each, of megatron-core's rotary angles [s, 1, 1, r]."""
    tables = _TABLES.get(angles)
    if tables is None:
        with torch.inference_mode(False):  # training reuses tables that evaluation created
            flat = angles.view(angles.shape[0], -1).float()
            tables = _TABLES[angles] = flat.cos(), flat.sin()
    return tables  # type: ignore[no-any-return]


class Attention(SelfAttention):
    """megatron-core's SelfAttention with one kernel that rotates queries and keys in FP32.

    megatron-core rotates with about ten torch operations in the compute dtype, and packs the gradients with three copies: 33 of 173 ms/step
    for GPT-1.3B at O0 (H200). With QK layernorm, queries and keys are not packed, so megatron-core's code still runs.
    """

    _angles: Tensor | None = None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] -> (the same after attention and projection, the projection's bias); arguments as SelfAttention's."""
        plain = not args and all(value is None for value in kwargs.values())
        if not plain or rotary_pos_emb is None or self.config.qk_layernorm:
            return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)
        self._angles = rotary_pos_emb
        try:
            return super().forward(hidden_states, attention_mask)
        finally:
            self._angles = None

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Query [s, b, heads, d], key and value [s, b, query groups, d] of this rank, rotated if `forward` requests it."""
        if self._angles is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        qkv, _ = self.linear_qkv(hidden_states)
        if self.linear_qkv._forward_hooks:
            qkv = qkv.clone()  # the rotation is in place, and a hook may have kept the tensor
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        return RotaryFunction.apply(qkv, *cos_sin(self._angles), heads, groups)  # type: ignore[no-any-return]


class SDPAttention(MegatronModule):
    """Scaled dot-product attention, causal or bidirectional, for megatron-core's `core_attention` slot.

    With context parallelism, sequences are split between ranks (`megatron.lm.data.batch.own_part`): this is ring attention, or attention of
    some heads of whole sequences between two all-to-alls.

    Args:
        config: head counts, attention dropout and softmax scale come from here.
        layer_number, attention_type: passed by megatron-core, unused.
        cp_comm_type: with context parallelism `p2p`, a ring, or `a2a`, an all-to-all of heads.
        wire: format in which keys and values travel, and queries with `a2a` (`msamp.parallel.ring_attention.WIRES`).
        attn_mask_type: `causal`, or `no_mask`: every token attends to its whole sequence except for the mask that `forward` gets.
        softmax_scale: factor on the scores; None is 1 / sqrt(kv_channels).
        backend: the allowed kernels, `auto | cudnn | flash | math`.

    Attributes:
        context: the ranks that share the sequences; None if each has whole sequences.

    Raises:
        ValueError: if the backend is unknown or unavailable, the mask type is another, or context parallelism would have dropout.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        backend: str = "auto",
        wire: str = "bf16",
    ) -> None:
        super().__init__(config=config)
        check_backend(backend, config.attention_dropout)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise ValueError(f"attention mask type {attn_mask_type} is not supported: choose causal or no_mask")
        self.causal = attn_mask_type is AttnMaskType.causal
        self.backends, self.masked_backends = BACKENDS[backend], MASKED_BACKENDS.get(backend, BACKENDS[backend])
        self.softmax_scale = softmax_scale
        self.dropout, self.backend, self.wire = config.attention_dropout, backend, wire
        self.context: Peers | None = None
        self.by_heads = cp_comm_type == "a2a"
        if config.context_parallel_size > 1:
            if self.dropout or cp_comm_type not in (None, *CP_COMM_TYPES):
                raise ValueError(
                    f"attention over split sequences got dropout {self.dropout:g} and cp_comm_type {cp_comm_type}: pass 0, and "
                    f"{' or '.join(CP_COMM_TYPES)}"
                )
            self.context = Peers(Grid.current().context.group, WireBytes())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object | None = None,
    ) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, query groups, d] -> [s, b, heads * d], all in the input's dtype.

        attention_mask: broadcast to [b, heads, s, s], bool, True where a query (third dimension) does not attend to a key (fourth), or
            additive (`document_mask`); [b, 1, 1, s] for padding. It replaces the causal mask, and so must contain it. Each query must
            attend to at least one key. With context parallelism it covers whole sequences, and is the same for all heads.

        Raises:
            ValueError: if there is a bias, packed sequences, a mask of padding in addition to the causal one, or a mask that the backend
            or context parallelism does not support.
        """
        only_keys = attention_mask is not None and attention_mask.shape[-2] == 1 < query.shape[0]
        if attention_bias is not None or packed_seq_params is not None or (only_keys and self.causal):
            raise ValueError(
                "core attention got a bias, packed sequences, or a padding mask in addition to the causal one, which are not supported; "
                "pass None"
            )
        if attention_mask is not None and self.backends == BACKENDS["flash"]:
            raise ValueError("--attention-backend flash does not support a mask; choose auto, cudnn or math")
        backends = self.backends if attention_mask is None or only_keys else self.masked_backends
        if self.context is None:
            return self._attend(query, key, value, attention_mask, backends)
        if (exchange := self.exchange(query.shape[0], attention_mask)) is not None:
            return exchange(query, key, value)
        scale = default_scale(query.shape[3]) if self.softmax_scale is None else self.softmax_scale
        return RingAttention(self.context, scale, self.causal, self.backend, self.wire)(query, key, value)

    def exchange(self, tokens: int, mask: Tensor | None = None) -> HeadExchange | None:
        """Return attention of this rank's heads with its two all-to-alls, for this rank's number of tokens and `forward`'s mask; None
        without `a2a`.

        Raises:
            ValueError: if context parallelism, or the backend, does not support the mask.
        """
        if self.context is None:
            return None
        if mask is not None:
            length = tokens * self.context.ranks
            if not self.by_heads:
                raise ValueError("cp_comm_type p2p, a ring of parts of sequences, does not support a mask: pass None, or use a2a")
            if self.backends == BACKENDS["flash"]:
                raise ValueError("--attention-backend flash does not support a mask; choose auto, cudnn or math")
            if mask.shape[1] != 1 or mask.shape[2] not in (1, length) or mask.shape[3] != length or (mask.shape[2] == 1 and self.causal):
                raise ValueError(f"a mask of split sequences is {tuple(mask.shape)}; expected a whole one, [b, 1, s or 1, {length}]")
        if not self.by_heads:
            return None
        backends = self.backends if mask is None or mask.shape[2] == 1 else self.masked_backends
        return HeadExchange(self.context, functools.partial(self._attend, attention_mask=mask, backends=backends), self.wire)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, backends: list[SDPBackend] | None = None
    ) -> Tensor:
        """Attention over whole sequences, see `forward`."""
        sequence, batch, heads, channels = query.shape
        dtype = query.dtype
        # Views: the kernels read any strides of the first three dimensions.
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if not query.is_cuda:
            # On a CPU torch's BF16 attention backward is 3x slower than FP32 with BF16 instructions, and far slower without.
            q, k, v = q.float(), k.float(), v.float()
        backends, repeats = self.backends if backends is None else backends, heads // key.shape[2]
        if repeats > 1 and backends[0] is SDPBackend.EFFICIENT_ATTENTION:
            # Its kernel has no groups of queries: torch would fall back to s x s scores of every head.
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks have different heads, so each needs its own dropout RNG; the block forked under sequence parallelism.
        forks = dropout and not self.config.sequence_parallel
        with sdpa_kernel(backends, set_priority=True), get_cuda_rng_tracker().fork() if forks else nullcontext():
            context = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=~attention_mask if attention_mask is not None and attention_mask.dtype is torch.bool else attention_mask,
                dropout_p=dropout,
                is_causal=self.causal and attention_mask is None,
                scale=self.softmax_scale,
                enable_gqa=k.shape[1] != heads,
            )
        return context.permute(2, 0, 1, 3).reshape(sequence, batch, heads * channels).to(dtype)


def count_context(model: nn.Module, sent: WireBytes) -> None:
    """Let the attention of a model count the bytes that context parallelism sends in `sent`."""
    for layer in model.modules():
        if isinstance(layer, SDPAttention) and layer.context is not None:
            layer.context.sent = sent


class FP8CoreAttention(SDPAttention):
    """`SDPAttention` in FP8 (`msamp.nn.fp8_attention`), without dropout, padding masks or a choice of kernels. With context parallelism
    all that travels is in FP8 (`msamp.parallel.fp8_ring_attention`, `msamp.parallel.fp8_head_exchange`).

    Scoring of text (`megatron.lm.evaluation.scoring_model`) attends in the compute dtype.

    Args:
        gemm: the casts of the model's linear layers, which define the scaling rule.
        The others: as for SDPAttention.

    Attributes:
        scaling: the scales, saved and rolled with the linear layers' scales.

    Raises:
        ValueError: as SDPAttention, with dropout, or if no kernel supports the head size.
    """

    def __init__(self, *args: Any, gemm: Gemms, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        channels = self.config.kv_channels
        assert channels is not None
        check_width(channels)
        if self.dropout:
            raise ValueError(
                f"FP8 attention does not support dropout ({self.dropout:g}): set --attention-dropout 0, or keep attention in BF16"
            )
        self.scaling = AttentionScaling(gemm, device=process_groups.device())
        self.scale = default_scale(channels) if self.softmax_scale is None else self.softmax_scale

    def now(self) -> FP8Attention:
        """Return the attention function with the current scales."""
        if self.context is None:
            return FP8Attention.of(self.scaling, self.scale, causal=self.causal)
        shared = FP8HeadExchange if self.by_heads else FP8RingAttention
        return shared(self.scaling, self.scale, self.causal, torch.is_grad_enabled(), self.context)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: object) -> Tensor:
        """Like `SDPAttention.forward`; ValueError with any mask, bias or packed sequences."""
        options.pop("attn_mask_type", None)
        if attention_mask is not None or any(option is not None for option in options.values()):
            raise ValueError(NO_MASK)
        return self.now()(query, key, value)

    def exchange(self, tokens: int, mask: Tensor | None = None) -> None:
        """Return None: `now` exchanges FP8 codes. ValueError with any mask."""
        if mask is not None:
            raise ValueError(NO_MASK)
