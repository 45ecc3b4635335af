"""torch.nn.MultiheadAttention with FP8 projections; the attention between them runs in the input's dtype."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from msamp.nn.linear import Loading
from msamp.nn.linear_fn import linear
from msamp.numerics.tensor import ScalingTensor


def why_not(module: nn.MultiheadAttention) -> str:
    """Return why the projections of an attention module cannot be converted; "" if they can."""
    if module.in_proj_weight is None:
        return "attention with keys or values of another width (kdim, vdim)"
    if module.bias_k is not None or module.add_zero_attn:
        return "attention with add_bias_kv or add_zero_attn"
    return ""


class _Rows(torch.autograd.Function):
    """Rows `start` to `stop` of a weight, as a read-only weight that shares its payload and its scale."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, start: int, stop: int) -> torch.Tensor:  # type: ignore[override]
        ctx.rows, ctx.shape = slice(start, stop), weight.shape
        if isinstance(weight, ScalingTensor):
            return ScalingTensor(weight.payload[start:stop], weight.scale_inv, weight.dtype)
        return weight[start:stop].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        whole = grad.new_zeros(ctx.shape)
        whole[ctx.rows] = grad
        return whole, None, None


class FP8MultiheadAttention(Loading, nn.MultiheadAttention):
    """A converted torch.nn.MultiheadAttention, with the same arguments, shapes and results.

    Self-attention projects query, key and value with one GEMM; otherwise each distinct input has its own. All share the scales in
    `scaling`. `out_proj` is an FP8Linear.
    """

    def _projected(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Project query, key and value [B, .., E] by their thirds of the weight; neighbors that are the same tensor share a GEMM."""
        size, start = self.embed_dim, 0
        projections: list[torch.Tensor] = []
        while start < 3:
            stop = start + 1
            while stop < 3 and inputs[stop] is inputs[start]:
                stop += 1
            whole = stop - start == 3
            rows = slice(start * size, stop * size)
            weight = self.in_proj_weight if whole else _Rows.apply(self.in_proj_weight, rows.start, rows.stop)
            bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
            projections += linear(inputs[start], weight, bias, self.scaling).chunk(stop - start, dim=-1)
            start = stop
        return projections

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is True, but attn_mask is None; is_causal only declares that the mask is causal: pass the mask too")
        batched = query.dim() == 3
        outputs: dict[int, torch.Tensor] = {}
        for x in (query, key, value):  # inputs that are the same tensor remain the same tensor
            outputs.setdefault(id(x), x.unsqueeze(0) if not batched else x if self.batch_first else x.transpose(0, 1))
        parts = self._projected([outputs[id(x)] for x in (query, key, value)])
        q, k, v = (part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for part in parts)
        mask = _merged(attn_mask, key_padding_mask, q, k)
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            attended = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(attended.transpose(1, 2).flatten(2))
        return (out.squeeze(0) if not batched else out if self.batch_first else out.transpose(0, 1)), weights


def _merged(attn: torch.Tensor | None, padding: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Merge torch's two masks (float, or bool where True masks out) into one that is added to the scores [B, H, L, S]."""
    batch, heads, length = q.shape[:3]

    def added(mask: torch.Tensor) -> torch.Tensor:
        return q.new_zeros(mask.shape).masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask.to(q.dtype)

    masks = []
    if attn is not None:
        masks.append(added(attn).view(batch, heads, length, -1) if attn.dim() == 3 else added(attn))
    if padding is not None:
        masks.append(added(padding).view(batch, 1, 1, k.shape[2]))
    return sum(masks[1:], masks[0]) if masks else None
