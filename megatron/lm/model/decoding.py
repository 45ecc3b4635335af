"""A trained GPT in inference: keys and values kept, sequences of different lengths side by side, FP8 weights as they stand.

    decoder = Decoder(model, capacity=2048)
    logits = decoder.prefill([[1, 2, 3], [4]])         # of the last token of each
    logits = decoder.step(logits.argmax(-1))           # of the next one

The layers' own modules compute (norms, linear layers, embedding, head), without dropout. What a sequence gives is what it gives alone but
for the order in which a kernel adds up: prompts are filled up behind, where a causal mask hides the filling; each row has positions and a
length of its own; and FP8 layers cast each row by itself (`msamp.nn.inference`).
"""

from collections.abc import Callable, Sequence

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron.lm.model.attention import SDPAttention
from megatron.lm.model.gpt import GPT
from megatron.lm.model.layer import Layer
from megatron.lm.model.linear import FP8Gemm
from msamp.nn.inference import InferenceGemm
from msamp.numerics.tensor import ScalingTensor


class Decoder:
    """The model in inference, and the keys and values of the sequences that it is at.

    The model stays as it is: its parameters are read, nothing of it is changed or kept in another mode. After a step of the optimizer make
    another Decoder.

    Args:
        model: whole, on one process: without tensor and pipeline parallelism.
        capacity: tokens of the longest sequence, prompt and continuation.

    Attributes:
        lengths: int64 [b], tokens seen of each sequence; empty before `prefill`.
        vocab_size: columns of the logits, the padding of the vocabulary with them.

    Raises:
        ValueError: a model in parts, an encoder, a capacity below 1 or beyond the learned positions.
    """

    def __init__(self, model: GPT, capacity: int) -> None:
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
        self._layers = [_InferenceLayer(layer) for layer in model.decoder.layers]
        self.device = next(model.parameters()).device
        self.lengths = torch.zeros(0, dtype=torch.int64, device=self.device)
        rotary = model.position_embedding_type == "rope"
        self._angles: Tensor | None = model.rotary_pos_emb(capacity).to(self.device) if rotary else None

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
    def prefill(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Begin with these sequences, in place of those before; FP32 [b, vocabulary], what comes after the last token of each."""
        tokens, self.lengths = self._filled_up(sequences)
        for layer in self._layers:
            layer.make_room(len(sequences), self._capacity)
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
        longest = int(self.lengths.max()) + 1 if len(self.lengths) else 0
        if longest > self._capacity:
            raise ValueError(f"a sequence holds {self._capacity} tokens, all that there is room for: give a larger capacity")
        hidden = self._run(tokens.to(self.device).unsqueeze(1), self.lengths, longest=longest)
        self.lengths = self.lengths + 1
        return self.head(hidden[:, 0])

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

    def _run(self, tokens: Tensor, at: Tensor | None, *, keep: bool = False, longest: int = 0) -> Tensor:
        """tokens [b, s] -> hidden states [b, s, h]; `at` [b]: where the one token of each row stands; None: all rows begin at 0."""
        count = tokens.shape[1]
        positions = torch.arange(count, device=self.device).expand_as(tokens) if at is None else at.unsqueeze(1)
        embedding = self._model.embedding
        x = embedding.word_embeddings(tokens)
        if embedding.add_position_embedding:
            x = x + embedding.position_embeddings(positions)
        angles = self._angles
        if angles is not None:
            # [s, 1, 1, r] of all rows, or [1, b, 1, r] of the one token of each.
            angles = angles[:count] if at is None else angles[at, 0, 0].view(1, len(at), 1, -1)
        mask = None if at is None else (torch.arange(longest, device=self.device) <= at.unsqueeze(1)).view(len(at), 1, 1, longest)
        for layer in self._layers:
            x = layer(x, angles, at, mask, keep=keep)
        norm = self._model.decoder.final_layernorm
        return x if norm is None else norm(x)


class _InferenceLayer:
    """One transformer layer: the arithmetic of `TransformerLayer` in evaluation, hidden states as [b, s, h]."""

    def __init__(self, layer: Layer) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        core = attention.core_attention
        assert isinstance(core, SDPAttention)
        if not core.causal:
            raise ValueError("the model was trained with --objective masked-lm and sees what follows a token: it continues no text")
        self._norms = layer.input_layernorm, layer.pre_mlp_layernorm
        self._qkv, self._proj = _linear(attention.linear_qkv), _linear(attention.linear_proj)
        self._query_norm, self._key_norm = attention.q_layernorm, attention.k_layernorm
        self._fc1, self._fc2 = _linear(mlp.linear_fc1), _linear(mlp.linear_fc2)
        self._heads, self._groups = attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition
        self._channels = attention.hidden_size_per_attention_head
        self._config, self._backends, self._scale = layer.config, core.backends, core.softmax_scale
        self._activation = layer.activation
        self._keys = self._values = torch.empty(0)

    def make_room(self, rows: int, capacity: int) -> None:
        """Keys and values of `rows` sequences: [b, groups, capacity, d] in the dtype of the activations."""
        shape = rows, self._groups, capacity, self._channels
        if self._keys.shape != shape:
            device = self._norms[0].weight.device
            self._keys, self._values = (torch.zeros(shape, dtype=self._config.params_dtype, device=device) for _ in range(2))

    def __call__(self, x: Tensor, angles: Tensor | None, at: Tensor | None, mask: Tensor | None, *, keep: bool) -> Tensor:
        x = x + self._proj(self._attend(self._qkv(self._norms[0](x)), angles, at, mask, keep))
        y = self._fc1(self._norms[1](x))
        if self._activation == "swiglu":
            gate, up = y.chunk(2, dim=-1)
            y = functional.silu(gate) * up
        else:
            y = functional.gelu(y, approximate="tanh")
        return x + self._fc2(y)

    def _attend(self, qkv: Tensor, angles: Tensor | None, at: Tensor | None, mask: Tensor | None, keep: bool) -> Tensor:
        batch, count = qkv.shape[:2]
        shared = self._heads // self._groups
        mixed = qkv.view(batch, count, self._groups, (shared + 2) * self._channels)  # of each group its queries, its key, its value
        query, key, value = mixed.split([shared * self._channels, self._channels, self._channels], dim=-1)
        query = query.reshape(batch, count, self._heads, self._channels)
        if self._query_norm is not None and self._key_norm is not None:
            query, key = self._query_norm(query), self._key_norm(key)
        if angles is not None:
            query, key = (apply_rotary_pos_emb(part.transpose(0, 1), angles, self._config).transpose(0, 1) for part in (query, key))
        q, k, v = (part.transpose(1, 2) for part in (query, key, value))  # [b, heads or groups, s, d]
        if keep:
            self._keys[:, :, :count], self._values[:, :, :count] = k, v
        elif at is not None and mask is not None:
            rows, longest = torch.arange(batch, device=at.device), mask.shape[-1]
            self._keys[rows, :, at], self._values[rows, :, at] = k[:, :, 0], v[:, :, 0]
            k, v = self._keys[:, :, :longest], self._values[:, :, :longest]
        if not q.is_cuda:
            q, k, v = q.float(), k.float(), v.float()  # as `SDPAttention` on a CPU
        with sdpa_kernel(self._backends, set_priority=True):
            context = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=self._heads != self._groups
            )
        return context.transpose(1, 2).reshape(batch, count, self._heads * self._channels).to(qkv.dtype)


def _linear(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A linear layer of the model with its bias added: in FP8 by rows, else as the module computes it."""
    weight, bias = module.weight, module.bias
    assert bias is None or isinstance(bias, Tensor)
    if isinstance(module, FP8Gemm) and isinstance(weight, ScalingTensor):
        gemm = InferenceGemm(weight, module.scaling.gemm)
        return lambda x: gemm(x, bias)

    def plain(x: Tensor) -> Tensor:
        y, left = module(x)
        return y if left is None else y + left

    return plain
