"""Inference with a trained GPT: a KV cache, batches of sequences with different lengths, and FP8 weights without conversion.

    decoder = Decoder(model, capacity=2048)
    logits = decoder.prefill([[1, 2, 3], [4]])         # after the last token of each
    logits = decoder.step(logits.argmax(-1))           # after the next one

The model's modules (norms, linear layers, embedding, head) run without dropout. The result is batch-invariant up to the order in which a
kernel sums: prompts are right-padded, where the causal mask hides the padding; each row has its own positions and length; and FP8 layers
cast each row separately (`decoding_mlp` has experts).

A step of few tokens is bound by the host's kernel launches. On a GPU it is a CUDA graph, one launch
(`megatron.lm.evaluation.decoding_graph`). An eager step has few launches: inputs that all layers share are computed once per step, one
kernel rotates queries and keys in place, and another writes keys and values to the cache. A step attends over the cache up to a multiple of
`SPAN` tokens, with a mask for positions beyond each sequence. So there are few graphs, and few shapes for which attention must choose a
kernel.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron.lm.evaluation.decoding_graph import CudaDevice, DecodingGraphs, obstacle, warn_eager
from megatron.lm.evaluation.decoding_mlp import InferenceLinear, inference_mlp
from megatron.lm.model.attention import SDPAttention
from megatron.lm.model.gpt import GPT
from megatron.lm.model.layer import Layer
from msamp.kernels import ops
from msamp.numerics.tensor import ScalingTensor

# At 1.3B with 8 sequences of 640 tokens, a step reads 2.6 GB of weights and 1.0 GB of keys and values. Spans of 256 add a fifth to the
# latter, 0.04 ms at 4.8 TB/s; powers of two would up to double it.
SPAN = 256
ALIGNED = 64  # the cache length is a multiple of it: attention copies a mask with another width


class Decoder:
    """A model for inference, with the KV cache of the current sequences.

    The decoder only reads the model's parameters and changes neither the model nor its mode. `prefill` uses the current weights, also after
    an optimizer step; call `renew` before `logits` and `hidden` if the weights have changed. If the model moves to another device or its
    modules change, build a new Decoder.

    On a GPU the third step over a span is captured as a CUDA graph, and later steps are replays with the same bits. `prefill` drops the
    graphs if the number of sequences changes, or if a tensor of the model has moved in memory. `prefill` itself is eager.

    Args:
        model: on one process, without tensor and pipeline parallelism.
        capacity: maximum tokens of a sequence, prompt and continuation.
        graph: whether to capture steps if possible; if it is impossible on a GPU, one warning has the reason.

    Attributes:
        lengths: int64 [b], number of tokens in each sequence; empty before `prefill`.
        vocab_size: columns of the logits, including padding of the vocabulary.

    Raises:
        ValueError: if the model is parallel or an encoder, or the capacity is less than 1 or more than the learned positions.
    """

    def __init__(self, model: GPT, capacity: int, *, graph: bool = True) -> None:
        config = model.config
        if config.tensor_model_parallel_size > 1 or config.pipeline_model_parallel_size > 1:
            raise ValueError(
                f"Decoder does not support {config.tensor_model_parallel_size} tensor-parallel and {config.pipeline_model_parallel_size} "
                "pipeline ranks: load the checkpoint on one process (load_for_inference), which works for any saved grid"
            )
        if config.expert_model_parallel_size > 1:
            raise ValueError(
                f"Decoder does not support {config.expert_model_parallel_size} expert-parallel ranks: load the checkpoint on one process "
                "(load_for_inference), which works for any saved grid"
            )
        positions = getattr(model.embedding, "position_embeddings", None)
        if capacity < 1 or (positions is not None and capacity > positions.weight.shape[0]):
            most = "" if positions is None else f" and at most {positions.weight.shape[0]}, the model's learned positions"
            raise ValueError(f"capacity {capacity} must be at least 1{most}")
        self._model, self._capacity = model, capacity
        self._room = -(-capacity // ALIGNED) * ALIGNED  # tokens per sequence in the cache
        self._layers = [_InferenceLayer(layer) for layer in model.decoder.layers]
        self.device = next(model.parameters()).device
        self.lengths = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._longest = 0  # the maximum of `lengths`, on the host, to avoid a sync
        rotary = model.position_embedding_type == "rope"
        angles = model.rotary_pos_emb(capacity).to(self.device)[:, 0, 0].float() if rotary else torch.zeros(capacity, 0, device=self.device)
        self._cos, self._sin = angles.cos(), angles.sin()  # FP32 [capacity, r], r = 0 without rotary embedding
        self._tokens, self._at = torch.zeros_like(self.lengths), torch.zeros_like(self.lengths)  # [b] each, inputs of a graph
        self._graphs: DecodingGraphs | None = None
        if graph and self.device.type == "cuda":
            reason = obstacle()
            if reason is None:
                self._graphs = DecodingGraphs(CudaDevice(self.device))
            else:
                warn_eager(reason)

    def __copy__(self) -> "Decoder":
        """Return a decoder that shares layers and KV cache, with its own graphs and their inputs."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._tokens, other._at, other._graphs = self._tokens.clone(), self._at.clone(), copy.deepcopy(self._graphs)
        return other

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @torch.no_grad()
    def logits(self, sequences: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the logits at chosen positions of each sequence, without filling the KV cache.

        Args:
            sequences: token ids of each, at least one and at most `capacity`.
            chosen: positions to return for each sequence.

        Returns:
            For each sequence FP32 [its positions, vocabulary].
        """
        hidden = self.hidden(sequences)
        return [self.head(hidden[row, torch.tensor(at, dtype=torch.int64, device=self.device)]) for row, at in enumerate(chosen)]

    @torch.no_grad()
    def hidden(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return hidden states [b, longest, h] before the head, without filling the KV cache; values at padding are meaningless."""
        return self._run(self._filled_up(sequences)[0], None)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits FP32 [n, vocabulary] of hidden states [n, h]."""
        shared = self._model.share_embeddings_and_output_weights
        weight = self._model.shared_embedding_or_output_weight() if shared else None
        return self._model.output_layer(hidden.unsqueeze(0), weight=weight)[0][0].float()

    @torch.no_grad()
    def renew(self) -> None:
        """Update to the current weights: recompute the FP8 copies of FP16 weights in place."""
        for layer in self._layers:
            layer.renew()

    def release(self) -> None:
        """Free the memory of graphs and cache, before training continues; the next call must be `prefill`."""
        if self._graphs is not None:
            self._graphs.release()
        self.lengths, self._longest = self.lengths[:0], 0
        for layer in self._layers:
            layer.make_room(0, 0)

    @torch.no_grad()
    def prefill(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Replace the current sequences by these; return the logits after the last token of each, FP32 [b, vocabulary].

        Args:
            sequences: token ids of each, at least one and at most `capacity`.

        Raises:
            ValueError: if there is no sequence, one is empty or longer than the capacity, or a token is outside the vocabulary.
        """
        tokens, self.lengths = self._filled_up(sequences)
        self._longest = tokens.shape[1]
        self.renew()
        if self._graphs is not None and len(sequences) != len(self._tokens):
            self._graphs.release()  # before allocating a cache next to the one that they keep alive
        for layer in self._layers:
            layer.make_room(len(sequences), self._room)
        if len(sequences) != len(self._tokens):
            self._tokens, self._at = torch.zeros_like(self.lengths), torch.zeros_like(self.lengths)
        if self._graphs is not None:
            self._graphs.begin(self._read())
        hidden = self._run(tokens, None, keep=True)
        return self.head(hidden[torch.arange(len(sequences), device=self.device), self.lengths - 1])

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens [b] int64, one to each sequence, and return the logits after them, FP32 [b, vocabulary].

        Raises:
            ValueError: if a sequence has reached the capacity, or the number of tokens differs from the number of sequences.
        """
        if tokens.shape != self.lengths.shape:
            raise ValueError(f"tokens have shape {list(tokens.shape)}, expected [{len(self.lengths)}]: one for each sequence of prefill")
        if self._longest >= self._capacity:
            raise ValueError(f"a sequence has reached the capacity of {self._capacity} tokens: build a Decoder with a larger capacity")
        span = min(self._room, -(-(self._longest + 1) // SPAN) * SPAN)
        if self._graphs is None:
            logits = self._appended(tokens.to(self.device), self.lengths, span)
        else:
            self._tokens.copy_(tokens)
            self._at.copy_(self.lengths)
            logits = self._graphs.step(span, functools.partial(self._appended, self._tokens, self._at, span))
        self.lengths, self._longest = self.lengths + 1, self._longest + 1
        return logits

    def _appended(self, tokens: Tensor, at: Tensor, span: int) -> Tensor:
        """Return the logits after `tokens` [b] at positions `at` [b], attending to the first `span` tokens of the cache; graphs capture
        this."""
        return self.head(self._run(tokens.unsqueeze(1), at, span=span)[:, 0])

    def _read(self) -> list[Tensor]:
        """Return the tensors that exist before a step and that it reads or writes, as aliases, since a Parameter's memory may be
        replaced."""
        tensors = [self._tokens, self._at, self._cos, self._sin]
        for x in (*self._model.parameters(), *self._model.buffers()):
            tensors += [x.payload, x.scale_inv] if isinstance(x, ScalingTensor) else [x.detach()]
        return [*tensors, *(x for layer in self._layers for x in layer.tensors())]

    def _filled_up(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the tokens right-padded with 0, int64 [b, longest], and the lengths, int64 [b]."""
        lengths = [len(sequence) for sequence in sequences]
        if not lengths or min(lengths) < 1 or max(lengths) > self._capacity:
            shown = f"{min(lengths)} to {max(lengths)} tokens" if lengths else "none"
            raise ValueError(f"sequences must have 1 to {self._capacity} tokens, but there are {shown}: shorten them, or leave them out")
        tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = torch.as_tensor(sequence, dtype=torch.int64)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise ValueError(f"token ids {int(tokens.min())} to {int(tokens.max())} must be in [0, {self.vocab_size})")
        return tokens.to(self.device), torch.tensor(lengths, dtype=torch.int64, device=self.device)

    def _run(self, tokens: Tensor, at: Tensor | None, *, keep: bool = False, span: int = 0) -> Tensor:
        """tokens [b, s] -> hidden states [b, s, h]; `at` [b]: position of each row's one token; None: all rows start at 0."""
        rows, count = tokens.shape
        positions = torch.arange(count, device=self.device).expand_as(tokens) if at is None else at.unsqueeze(1)
        embedding = self._model.embedding
        x = embedding.word_embeddings(tokens)
        if embedding.add_position_embedding:
            x = x + embedding.position_embeddings(positions)
        flat = positions.reshape(-1)
        where = _Where(self._cos[flat], self._sin[flat], keep)
        if at is not None:
            where.places = torch.arange(rows, device=self.device) * self._room + at
            # An additive mask: from a bool mask attention would create one in every layer. A CPU attends in FP32.
            dtype = self._model.config.params_dtype if self.device.type == "cuda" else torch.float32
            mask = torch.zeros(rows, 1, 1, span, dtype=dtype, device=self.device)
            unseen = torch.arange(span, device=self.device) > at.unsqueeze(1)
            where.mask = mask.masked_fill_(unseen.view(mask.shape), -torch.inf)
        for layer in self._layers:
            x = layer(x, where)
        norm = self._model.decoder.final_layernorm
        return x if norm is None else norm(x)


@dataclass
class _Where:
    """Inputs that all layers of a step share, for its b x s tokens.

    Attributes:
        cos, sin: FP32 [b s, r], for the position of each token.
        keep: whether to cache keys and values of whole sequences.
        places: int64 [b], index in the cache of b x room for the key and value of each row's one token; None: do not cache.
        mask: [b, 1, 1, span] in the dtype of attention, 0 where a token attends to the cache and -inf elsewhere; None: causal attention
            within the sequence.
    """

    cos: Tensor
    sin: Tensor
    keep: bool
    places: Tensor | None = None
    mask: Tensor | None = None


class _InferenceLayer:
    """One transformer layer with the arithmetic of `TransformerLayer` in evaluation, for hidden states [b, s, h]."""

    def __init__(self, layer: Layer) -> None:
        attention = layer.self_attention
        core = attention.core_attention
        assert isinstance(core, SDPAttention)
        if not core.causal:
            raise ValueError("the model was trained with --objective masked-lm, so it cannot generate text: use a causal language model")
        self._norms = layer.input_layernorm, layer.pre_mlp_layernorm
        self._qkv, self._proj = InferenceLinear(attention.linear_qkv), InferenceLinear(attention.linear_proj)
        self._query_norm, self._key_norm = attention.q_layernorm, attention.k_layernorm
        self._mlp = inference_mlp(layer.mlp, layer.activation)
        self._heads, self._groups = attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition
        self._channels = attention.hidden_size_per_attention_head
        self._config, self._backends, self._scale = layer.config, core.backends, core.softmax_scale
        self._cache = torch.empty(0)

    def renew(self) -> None:
        """Update to the current weights."""
        for part in (self._qkv, self._proj, self._mlp):
            part.renew()

    def tensors(self) -> list[Tensor]:
        """Return the tensors of a step that are not the model's: the cache, FP8 copies and tables of scales."""
        return [self._cache, *(x for part in (self._qkv, self._proj, self._mlp) for x in part.tensors())]

    def make_room(self, rows: int, room: int) -> None:
        """Keys and values of `rows` sequences: [b, room, groups, 2, d] in the dtype of the activations."""
        shape = rows, room, self._groups, 2, self._channels
        if self._cache.shape != shape:
            self._cache = torch.empty(0)  # free the previous one first
            self._cache = torch.zeros(shape, dtype=self._config.params_dtype, device=self._norms[0].weight.device)

    def __call__(self, x: Tensor, where: _Where) -> Tensor:
        x = x + self._proj(self._attend(self._qkv(self._norms[0](x)), where))
        return x + self._mlp(self._norms[1](x))

    def _attend(self, qkv: Tensor, where: _Where) -> Tensor:
        batch, count = qkv.shape[:2]
        shared, tokens = self._heads // self._groups, batch * count
        mixed = qkv.view(batch, count, self._groups, shared + 2, self._channels)  # per group its queries, its key, its value
        if self._query_norm is not None and self._key_norm is not None:
            mixed[..., :shared, :] = self._query_norm(mixed[..., :shared, :])
            mixed[..., shared, :] = self._key_norm(mixed[..., shared, :])
        ops.rotary_(mixed.view(tokens, 1, -1), where.cos, where.sin, self._heads, self._groups)
        query, kept = mixed[..., :shared, :].reshape(batch, count, self._heads, self._channels), mixed[..., shared:, :]
        if where.keep:
            self._cache[:, :count] = kept
            self._cache[:, count:] = 0  # masked values have weight 0, and 0 times a stale Inf would be NaN
        elif where.places is not None and where.mask is not None:
            self._cache.flatten(0, 1).index_copy_(0, where.places, kept[:, 0].to(self._cache.dtype))
            kept = self._cache[:, : where.mask.shape[-1]]
        q, k, v = (part.transpose(1, 2) for part in (query, *kept.unbind(-2)))  # [b, heads or groups, s, d]
        if not q.is_cuda:
            q, k, v = q.float(), k.float(), v.float()  # as `SDPAttention` on a CPU
        mask = None if where.mask is None else where.mask.to(q.dtype)
        with sdpa_kernel(self._backends, set_priority=True):
            context = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=self._heads != self._groups
            )
        return context.transpose(1, 2).reshape(batch, count, self._heads * self._channels).to(qkv.dtype)
