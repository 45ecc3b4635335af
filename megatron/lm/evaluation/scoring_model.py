"""The forward pass of a trained GPT for scoring text, in which the result of a sequence does not depend on its batch.

Training casts the input of an FP8 layer with one scale for the whole batch. Here each row is cast by itself (`msamp.nn.inference`), prompts
are right-padded, where the causal mask hides the padding, and attention runs in the compute dtype. Experts in FP8 would have one scale for
all rows, so their weights are dequantized to the compute dtype: 2 bytes per parameter of the experts in addition to the stored weights.
Only the order in which a kernel sums may still depend on the number of rows.
"""

from collections.abc import Callable, Sequence

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron.lm.model.attention import SDPAttention
from megatron.lm.model.gpt import GPT
from megatron.lm.model.layer import Layer
from megatron.lm.model.linear import FP8Gemm
from megatron.lm.model.moe.layer import MoE
from msamp.kernels import ops
from msamp.nn.expert_layer import plain_experts
from msamp.nn.expert_matrices import ExpertMatrices
from msamp.nn.inference import InferenceGemm
from msamp.numerics.tensor import ScalingTensor

Function = Callable[[Tensor], Tensor]


class ScoringModel:
    """The hidden states and logits of a model on one process, as `load_for_inference` returns it. The model is only read.

    Args:
        model: a causal language model; its weights must not change afterwards.
        seq_length: most tokens of a sequence.

    Attributes:
        device: of the model's parameters.
    """

    def __init__(self, model: GPT, seq_length: int) -> None:
        self._model, self._seq_length = model, seq_length
        self.device = next(model.parameters()).device
        rotary = model.position_embedding_type == "rope"
        angles = model.rotary_pos_emb(seq_length)[:, 0, 0].float() if rotary else torch.zeros(seq_length, 0)
        angles = angles.to(self.device)
        self._cos, self._sin = angles.cos(), angles.sin()  # FP32 [seq_length, r], r = 0 without rotary embedding
        self._layers = [_ScoringLayer(layer) for layer in model.decoder.layers]

    @torch.no_grad()
    def hidden(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return hidden states [b, longest, h] before the head; values at padding are meaningless.

        Raises:
            ValueError: a token is outside the vocabulary.
        """
        tokens = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = torch.as_tensor(sequence, dtype=torch.int64)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._model.vocab_size:
            raise ValueError(f"token ids {int(tokens.min())} to {int(tokens.max())} must be in [0, {self._model.vocab_size})")
        tokens = tokens.to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        embedding = self._model.embedding
        x = embedding.word_embeddings(tokens)
        if embedding.add_position_embedding:
            x = x + embedding.position_embeddings(positions)
        cos, sin = self._cos[positions.reshape(-1)], self._sin[positions.reshape(-1)]
        for layer in self._layers:
            x = layer(x, cos, sin)
        norm = self._model.decoder.final_layernorm
        return x if norm is None else norm(x)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits FP32 [n, vocabulary] of hidden states [n, h]."""
        shared = self._model.share_embeddings_and_output_weights
        weight = self._model.shared_embedding_or_output_weight() if shared else None
        return self._model.output_layer(hidden.unsqueeze(0), weight=weight)[0][0].float()


class _ScoringLayer:
    """One transformer layer with the arithmetic of `TransformerLayer` in evaluation, for hidden states [b, s, h]."""

    def __init__(self, layer: Layer) -> None:
        attention, self._core = layer.self_attention, layer.self_attention.core_attention
        assert isinstance(self._core, SDPAttention)
        self._norms = layer.input_layernorm, layer.pre_mlp_layernorm
        self._qkv, self._proj = linear(attention.linear_qkv), linear(attention.linear_proj)
        self._query_norm, self._key_norm = attention.q_layernorm, attention.k_layernorm
        self._mlp = mlp(layer.mlp, layer.activation)
        self._heads, self._groups = attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition
        self._channels = attention.hidden_size_per_attention_head

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """cos, sin: FP32 [b s, r], for the position of each token."""
        x = x + self._proj(self._attend(self._qkv(self._norms[0](x)), cos, sin))
        return x + self._mlp(self._norms[1](x))

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, count = qkv.shape[:2]
        shared = self._heads // self._groups
        mixed = qkv.view(batch, count, self._groups, shared + 2, self._channels)  # per group its queries, its key, its value
        if self._query_norm is not None and self._key_norm is not None:
            mixed[..., :shared, :] = self._query_norm(mixed[..., :shared, :])
            mixed[..., shared, :] = self._key_norm(mixed[..., shared, :])
        ops.rotary_(mixed.view(batch * count, 1, -1), cos, sin, self._heads, self._groups)
        query = mixed[..., :shared, :].reshape(batch, count, self._heads, self._channels)
        q, k, v = (part.transpose(1, 2) for part in (query, *mixed[..., shared:, :].unbind(-2)))  # [b, heads or groups, s, d]
        if not q.is_cuda:
            q, k, v = q.float(), k.float(), v.float()  # as `SDPAttention` on a CPU
        grouped = self._heads != self._groups
        with sdpa_kernel(self._core.backends, set_priority=True):
            context = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._core.softmax_scale, enable_gqa=grouped)
        return context.transpose(1, 2).reshape(batch, count, self._heads * self._channels).to(qkv.dtype)


def linear(module: nn.Module) -> Function:
    """Return a linear layer including its bias: in FP8 with a scale per row, or else by calling the module."""
    weight = module.weight
    if isinstance(module, FP8Gemm) and isinstance(weight, ScalingTensor):
        gemm = InferenceGemm(weight, module.scaling.gemm)  # type: ignore[union-attr]
        return lambda x: gemm(x, module.bias)  # type: ignore[arg-type]

    def called(x: Tensor) -> Tensor:
        y, bias = module(x)
        return y if bias is None else y + bias

    return called


def mlp(module: MLP | MoE, activation: str) -> Function:
    """Return the MLP of a layer, dense or a mixture of experts with its shared expert, for x [b, s, h]; `activation`: `activation_of` the
    layer."""
    if isinstance(module, MoE):
        return _mixture(module, activation)
    fc1, fc2 = linear(module.linear_fc1), linear(module.linear_fc2)

    def dense(x: Tensor) -> Tensor:
        y = fc1(x)
        if activation == "swiglu":
            gate, up = y.chunk(2, dim=-1)
            return fc2(functional.silu(gate) * up)
        return fc2(functional.relu(y).square() if activation == "squared-relu" else functional.gelu(y, approximate="tanh"))

    return dense


def _mixture(layer: MoE, activation: str) -> Function:
    shared = None if layer.shared_experts is None else mlp(layer.shared_experts, activation)
    weights = [getattr(layer.experts, name) for name in layer.experts.weight_names]
    with torch.no_grad():
        fc1, fc2 = (weight.stacked() if isinstance(weight, ExpertMatrices) else weight for weight in weights)

    def mixture(x: Tensor) -> Tensor:
        probs, experts = layer.router(x)
        y = plain_experts(x.flatten(0, 1), probs, experts, fc1, fc2).view_as(x)
        return y if shared is None else y + shared(x)

    return mixture
