"""Norms of queries and keys, per head, between the packed QKV projection and the rotary embedding of a fused block (QK layernorm, Qwen3).

Forward writes the normalized queries and keys over those in the packed projection, and saves what they were. So the rotary embedding and
the attention after it read the same tensor as without these norms. Backward does the same with the packed gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from msamp.kernels import ops
from msamp.kernels.reference.rotary import grouped_heads
from msamp.nn.block import CastTransposed, Norm, NormGradients, NormWeights, vector_gradients


class HeadNormWeights(NamedTuple):
    """The parameters of both norms, which all heads share: weights and biases [d]; no biases for RMSNorm."""

    query_weight: torch.Tensor
    query_bias: torch.Tensor | None
    key_weight: torch.Tensor
    key_bias: torch.Tensor | None


class _Kept(NamedTuple):
    """What a norm saves for backward: its input [M, d], a row for each token and head, and FP32 [M] of `ops.normalize`."""

    rows: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


class HeadNorms:
    """Normalizes the queries and keys of a packed projection in place.

    Args:
        qkv: [s, b, (heads + 2 groups) * d], contiguous, in Megatron's order: for each group its queries, key, value; or with `apart` in
            Hugging Face's: all queries, all keys, all values.
        norm: LayerNorm or RMSNorm, and its epsilon.
        weights: of both norms.
        heads, groups: number of heads of queries, and of keys and values.
        apart: see `qkv`.
        whole: normalize all queries of a token together, and all keys; weights are [heads * d] and [groups * d]. Only with `apart`.
    """

    TENSORS = 6  # that `take` returns

    def __init__(
        self, qkv: torch.Tensor, norm: Norm, weights: HeadNormWeights, heads: int, groups: int, *, apart: bool = False, whole: bool = False
    ) -> None:
        self.norm, self.heads, self.groups, self.apart, self.whole = norm, heads, groups, apart, whole
        self.kept = [self._normalize(part, *pair) for part, pair in zip(self._parts(qkv), (weights[:2], weights[2:]), strict=True)]

    def _parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views of the queries [s, b, groups, heads / groups, d] and the keys [s, b, groups, 1, d]."""
        query, key, _ = grouped_heads(qkv, self.heads, self.groups, self.apart)
        return (query.flatten(2), key.flatten(2)) if self.whole else (query, key)

    def _normalize(self, part: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> _Kept:
        rows = part.clone(memory_format=torch.contiguous_format).view(-1, part.shape[-1])
        normed = NormWeights(self.norm, weight, bias).run(rows, scale=None, amax_slot=None, dtype=rows.dtype)
        part.copy_(normed.y.view(part.shape))
        return _Kept(rows, normed.mean, normed.rstd)

    def take(self) -> list[torch.Tensor]:
        """Hand over what backward needs, for autograd to save; `give` returns it."""
        tensors = [tensor for kept in self.kept for tensor in kept]
        self.kept = []
        return tensors

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take back the tensors of `take`."""
        self.kept = [_Kept(*tensors[:3]), _Kept(*tensors[3:])]

    @staticmethod
    def saved_bytes(heads: float, groups: float, head_size: int, wide: int) -> float:
        """Return the bytes per token saved for backward, without the statistics, for `wide` bytes per element of the projection."""
        return wide * (heads + groups) * head_size

    def backward(self, grad: torch.Tensor, weights: HeadNormWeights) -> list[torch.Tensor | None]:
        """Turn the gradient of the normalized projection, like `qkv`, into the gradient of the projection, in place.

        Returns:
            The gradients of `weights`, in their order; None for a missing bias.
        """
        sums: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for part, kept, (weight, bias) in zip(self._parts(grad), self.kept, (weights[:2], weights[2:]), strict=True):
            rows = part.clone(memory_format=torch.contiguous_format).view(-1, part.shape[-1])
            gradients = NormGradients(
                *ops.normalize_backward(rows, kept.rows, kept.mean, kept.rstd, weight, grad_residual=None, rms=self.norm.rms)
            )
            part.copy_(gradients.x.view(part.shape))
            sums += [(gradients.weight_sums, weight), (gradients.bias_sums, bias)]
        self.kept = []
        return vector_gradients(*sums)


def cast_packed(grad: torch.Tensor, *, dtype: torch.dtype, colsum: bool = False, **options: Any) -> CastTransposed:
    """Cast a packed gradient [M, width] for the two GEMMs of QKV's backward, with the arguments of `ops.rotary_backward`: to a wide dtype
    without transpose and scale_inv."""
    if dtype.itemsize > 1:
        empty = grad.new_empty(0, dtype=torch.float32)
        return CastTransposed(grad.to(dtype), grad.new_empty(0), empty, grad.sum(0, keepdim=True, dtype=torch.float32) if colsum else empty)
    return CastTransposed(*ops.cast_transpose(grad, dtype=dtype, row=True, col=True, colsum=colsum, **options))
