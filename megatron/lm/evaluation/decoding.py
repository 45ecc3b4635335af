"""A trained GPT in inference: keys and values kept, sequences of different lengths side by side, FP8 weights as they stand.

    decoder = Decoder(model, capacity=2048)
    logits = decoder.prefill([[1, 2, 3], [4]])         # of the last token of each
    logits = decoder.step(logits.argmax(-1))           # of the next one

The layers' own modules compute (norms, linear layers, embedding, head), without dropout. What a sequence gives is what it gives alone but
for the order in which a kernel adds up: prompts are filled up behind, where a causal mask hides the filling; each row has positions and a
length of its own; and FP8 layers cast each row by itself (`msamp.nn.inference`).

A step of few tokens is bound by the host, which launches its kernels. On a GPU it is a CUDA graph, one launch
(`megatron.lm.evaluation.decoding_graph`). Elsewhere it has few of them: what all layers need alike is made once a step, queries and keys
are rotated by one launch where they stand, and keys and values go to their places by another. A step attends over the cache up to a
multiple of `SPAN` tokens, and a mask hides what a sequence has not reached. So there are few graphs, and few shapes to choose a kernel of
attention for.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron.lm.evaluation.decoding_graph import CudaDevice, DecodingGraphs, obstacle, tell
from megatron.lm.model.attention import SDPAttention
from megatron.lm.model.gpt import GPT
from megatron.lm.model.layer import Layer
from megatron.lm.model.linear import FP8Gemm
from msamp.kernels import ops
from msamp.nn.inference import InferenceGemm
from msamp.numerics.tensor import ScalingTensor

# At 1.3B, 8 sequences of 640 tokens, a step reads 2.6 GB of weights and 1.0 GB of keys and values. Spans of 256 add a fifth to the second,
# 0.04 ms of 4.8 TB/s; powers of two would add up to all of it again.
SPAN = 256
ALIGNED = 64  # tokens of the cache: attention copies a mask of another width


class Decoder:
    """The model in inference, and the keys and values of the sequences that it is at.

    The model stays as it is: its parameters are read, nothing of it is changed or kept in another mode. `prefill` takes the weights as
    they are then, after a step of the optimizer too; before `logits` and `hidden` call `renew`. A model on another device, or with other
    modules, wants another Decoder.

    On a GPU the third step over a span is captured as a CUDA graph, and later ones are replays, with the same bits. The graphs are dropped
    where `prefill` finds another number of sequences, or a tensor of the model elsewhere in memory. `prefill` itself is eager.

    Args:
        model: whole, on one process: without tensor and pipeline parallelism.
        capacity: tokens of the longest sequence, prompt and continuation.
        graph: whether steps are captured where they can be; what stands in the way on a GPU is told once, as a warning.

    Attributes:
        lengths: int64 [b], tokens seen of each sequence; empty before `prefill`.
        vocab_size: columns of the logits, the padding of the vocabulary with them.

    Raises:
        ValueError: a model in parts, an encoder, a capacity below 1 or beyond the learned positions.
    """

    def __init__(self, model: GPT, capacity: int, *, graph: bool = True) -> None:
        config = model.config
        if config.tensor_model_parallel_size > 1 or config.pipeline_model_parallel_size > 1:
            raise ValueError(
                f"a model over {config.tensor_model_parallel_size} tensor-parallel and {config.pipeline_model_parallel_size} pipeline "
                "ranks is not decoded: load the checkpoint on one process (load_for_inference), whatever its grid was"
            )
        positions = getattr(model.embedding, "position_embeddings", None)
        if capacity < 1 or (positions is not None and capacity > positions.weight.shape[0]):
            most = "" if positions is None else f" and at most {positions.weight.shape[0]}, the model's learned positions"
            raise ValueError(f"capacity {capacity} must be at least 1{most}")
        self._model, self._capacity = model, capacity
        self._room = -(-capacity // ALIGNED) * ALIGNED  # of a sequence in the cache
        self._layers = [_InferenceLayer(layer) for layer in model.decoder.layers]
        self.device = next(model.parameters()).device
        self.lengths = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._longest = 0  # of them, for which the host need not wait for the device
        rotary = model.position_embedding_type == "rope"
        angles = model.rotary_pos_emb(capacity).to(self.device)[:, 0, 0].float() if rotary else torch.zeros(capacity, 0, device=self.device)
        self._cos, self._sin = angles.cos(), angles.sin()  # FP32 [capacity, r], r = 0 without rotary embedding
        self._tokens, self._at = torch.zeros_like(self.lengths), torch.zeros_like(self.lengths)  # [b] each, what a graph reads
        self._graphs: DecodingGraphs | None = None
        if graph and self.device.type == "cuda":
            reason = obstacle()
            if reason is None:
                self._graphs = DecodingGraphs(CudaDevice(self.device))
            else:
                tell(reason)

    def __copy__(self) -> "Decoder":
        """Layers, and so keys and values, are those of this one; graphs, and what they read, are its own."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._tokens, other._at, other._graphs = self._tokens.clone(), self._at.clone(), copy.deepcopy(self._graphs)
        return other

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @torch.no_grad()
    def logits(self, sequences: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits at some positions of each sequence, nothing kept.

        Args:
            sequences: token ids of each, at least one and at most `capacity`.
            chosen: of each sequence, the positions wanted.

        Returns:
            Of each sequence, FP32 [its positions, vocabulary].
        """
        hidden = self.hidden(sequences)
        return [self.head(hidden[row, torch.tensor(at, dtype=torch.int64, device=self.device)]) for row, at in enumerate(chosen)]

    @torch.no_grad()
    def hidden(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states [b, longest, h] before the head, nothing kept; behind a shorter sequence they mean nothing."""
        return self._run(self._filled_up(sequences)[0], None)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, h] -> logits, FP32 [n, vocabulary]."""
        shared = self._model.share_embeddings_and_output_weights
        weight = self._model.shared_embedding_or_output_weight() if shared else None
        return self._model.output_layer(hidden.unsqueeze(0), weight=weight)[0][0].float()

    @torch.no_grad()
    def renew(self) -> None:
        """Take the weights as they are now. FP8 copies of FP16 weights are made again, where they stand."""
        for layer in self._layers:
            layer.renew()

    def release(self) -> None:
        """Give the memory of graphs and cache back, before training goes on; the next call is `prefill`."""
        if self._graphs is not None:
            self._graphs.release()
        self.lengths, self._longest = self.lengths[:0], 0
        for layer in self._layers:
            layer.make_room(0, 0)

    @torch.no_grad()
    def prefill(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Begin with these sequences, in place of those before; FP32 [b, vocabulary], what comes after the last token of each.

        Args:
            sequences: token ids of each, at least one and at most `capacity`.

        Raises:
            ValueError: no sequence, an empty one or one beyond the capacity, or a token outside the vocabulary.
        """
        tokens, self.lengths = self._filled_up(sequences)
        self._longest = tokens.shape[1]
        self.renew()
        if self._graphs is not None and len(sequences) != len(self._tokens):
            self._graphs.release()  # before there is another cache beside the one that they hold
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
        """Append tokens [b] int64, one to each sequence; FP32 [b, vocabulary], what comes after them.

        Raises:
            ValueError: a sequence has reached the capacity, or another number of tokens than of sequences.
        """
        if tokens.shape != self.lengths.shape:
            raise ValueError(f"tokens have shape {list(tokens.shape)}, wanted [{len(self.lengths)}]: one for each sequence of prefill")
        if self._longest >= self._capacity:
            raise ValueError(f"a sequence holds {self._capacity} tokens, all that there is room for: give a larger capacity")
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
        """Logits after `tokens` [b] at the places `at` [b], which see at most the first `span` tokens of the cache: all of a graph."""
        return self.head(self._run(tokens.unsqueeze(1), at, span=span)[:, 0])

    def _read(self) -> list[Tensor]:
        """What a step reads and writes beside what it makes itself. Aliases: a Parameter may be given other memory."""
        found = [self._tokens, self._at, self._cos, self._sin]
        for x in (*self._model.parameters(), *self._model.buffers()):
            found += [x.payload, x.scale_inv] if isinstance(x, ScalingTensor) else [x.detach()]
        return [*found, *(x for layer in self._layers for x in layer.tensors())]

    def _filled_up(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Tokens [b, longest] int64, filled up behind with 0, and lengths [b] int64."""
        lengths = [len(sequence) for sequence in sequences]
        if not lengths or min(lengths) < 1 or max(lengths) > self._capacity:
            shown = f"{min(lengths)} to {max(lengths)} tokens" if lengths else "none"
            raise ValueError(f"sequences of 1 to {self._capacity} tokens are taken, and there are {shown}: shorten them, or leave them out")
        tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = torch.as_tensor(sequence, dtype=torch.int64)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise ValueError(f"token ids {int(tokens.min())} to {int(tokens.max())} must lie in [0, {self.vocab_size})")
        return tokens.to(self.device), torch.tensor(lengths, dtype=torch.int64, device=self.device)

    def _run(self, tokens: Tensor, at: Tensor | None, *, keep: bool = False, span: int = 0) -> Tensor:
        """tokens [b, s] -> hidden states [b, s, h]; `at` [b]: where the one token of each row stands; None: all rows begin at 0."""
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
            # Added, not a choice: attention would make the one of the other in every layer. A CPU attends in FP32.
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
    """What all layers of a step need to know of its b x s tokens.

    Attributes:
        cos, sin: FP32 [b s, r], of the position of each.
        keep: whether keys and values of whole sequences are kept.
        places: int64 [b], where the key and value of the one token of each row go in the cache of b x room; None: nowhere.
        mask: [b, 1, 1, span] in the dtype in which attention computes, 0 where a token sees the cache and minus infinity elsewhere;
            None: a token sees what stands before it in its sequence.
    """

    cos: Tensor
    sin: Tensor
    keep: bool
    places: Tensor | None = None
    mask: Tensor | None = None


class _InferenceLayer:
    """One transformer layer: the arithmetic of `TransformerLayer` in evaluation, hidden states as [b, s, h]."""

    def __init__(self, layer: Layer) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        core = attention.core_attention
        assert isinstance(core, SDPAttention)
        if not core.causal:
            raise ValueError("the model was trained with --objective masked-lm and sees what follows a token: it continues no text")
        self._norms = layer.input_layernorm, layer.pre_mlp_layernorm
        self._qkv, self._proj = _Linear(attention.linear_qkv), _Linear(attention.linear_proj)
        self._query_norm, self._key_norm = attention.q_layernorm, attention.k_layernorm
        self._fc1, self._fc2 = _Linear(mlp.linear_fc1), _Linear(mlp.linear_fc2)
        self._heads, self._groups = attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition
        self._channels = attention.hidden_size_per_attention_head
        self._config, self._backends, self._scale = layer.config, core.backends, core.softmax_scale
        self._activation = layer.activation
        self._cache = torch.empty(0)

    def renew(self) -> None:
        """Take the weights as they are now."""
        for linear in (self._qkv, self._proj, self._fc1, self._fc2):
            linear.renew()

    def tensors(self) -> list[Tensor]:
        """What a step reads and writes beside the model's own tensors: the cache, FP8 copies and tables of scales."""
        return [self._cache, *(x for linear in (self._qkv, self._proj, self._fc1, self._fc2) for x in linear.tensors())]

    def make_room(self, rows: int, room: int) -> None:
        """Keys and values of `rows` sequences: [b, room, groups, 2, d] in the dtype of the activations."""
        shape = rows, room, self._groups, 2, self._channels
        if self._cache.shape != shape:
            self._cache = torch.empty(0)  # the one before goes first
            self._cache = torch.zeros(shape, dtype=self._config.params_dtype, device=self._norms[0].weight.device)

    def __call__(self, x: Tensor, where: _Where) -> Tensor:
        x = x + self._proj(self._attend(self._qkv(self._norms[0](x)), where))
        y = self._fc1(self._norms[1](x))
        if self._activation == "swiglu":
            gate, up = y.chunk(2, dim=-1)
            y = functional.silu(gate) * up
        else:
            y = functional.gelu(y, approximate="tanh")
        return x + self._fc2(y)

    def _attend(self, qkv: Tensor, where: _Where) -> Tensor:
        batch, count = qkv.shape[:2]
        shared, tokens = self._heads // self._groups, batch * count
        mixed = qkv.view(batch, count, self._groups, shared + 2, self._channels)  # of each group its queries, its key, its value
        if self._query_norm is not None and self._key_norm is not None:
            mixed[..., :shared, :] = self._query_norm(mixed[..., :shared, :])
            mixed[..., shared, :] = self._key_norm(mixed[..., shared, :])
        ops.rotary_(mixed.view(tokens, 1, -1), where.cos, where.sin, self._heads, self._groups)
        query, kept = mixed[..., :shared, :].reshape(batch, count, self._heads, self._channels), mixed[..., shared:, :]
        if where.keep:
            self._cache[:, :count] = kept
            self._cache[:, count:] = 0  # what is masked counts 0 times, which an infinity of the batch before would turn into NaN
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


class _Linear:
    """A linear layer of the model with its bias added: in FP8 by rows, else as the module computes it.

    Attributes:
        gemm: the product in FP8; None for a module that computes it itself.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, weight = module, module.weight
        fp8 = isinstance(module, FP8Gemm) and isinstance(weight, ScalingTensor)
        self.gemm = InferenceGemm(weight, module.scaling.gemm) if fp8 else None  # type: ignore[arg-type, union-attr]

    def renew(self) -> None:
        """Take the weight as it is now."""
        if self.gemm is not None:
            self.gemm.renew(self._module.weight)  # type: ignore[arg-type]

    def tensors(self) -> list[Tensor]:
        """The operand of the FP8 product; none of a module that computes it itself."""
        return [] if self.gemm is None else [self.gemm.weight.codes, self.gemm.weight.scale_inv]

    def __call__(self, x: Tensor) -> Tensor:
        if self.gemm is not None:
            return self.gemm(x, self._module.bias)  # type: ignore[arg-type]
        y, left = self._module(x)
        return y if left is None else y + left
