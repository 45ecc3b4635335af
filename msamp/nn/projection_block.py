"""The first part of attention as one autograd function: norm, one GEMM for queries, keys and values, norms of the heads, rotary embedding.

The attention itself stays outside, in the model's own autograd graph: any kernel with any mask, window or cache, from the queries, keys and
values that this function returns as views of one tensor. `msamp.nn.attention_block` is the whole attention, for models whose attention is
known. Activations are [batch, sequence, hidden] here, as in transformers, and the three projections are separate parameters, whose rows one
GEMM reads below each other (`LayerGemm.more`).
"""

import functools
from typing import Any, NamedTuple

import torch

from msamp.kernels import ops, scalar_pool
from msamp.kernels.reference.rotary import grouped_heads
from msamp.nn.attention_block import projection_grad
from msamp.nn.block import Inner, KeptByBlock, Norm, NormWeights, finish_backward, rows_of_each
from msamp.nn.differentiable_once import differentiable_once
from msamp.nn.ends import ALONE, Ends
from msamp.nn.gemm import LayerGemm
from msamp.nn.head_norms import HeadNorms, HeadNormWeights
from msamp.nn.saved_activations import AS_IT_IS, Saved
from msamp.numerics.tensor import ScalingTensor


class ProjectionSettings(NamedTuple):
    """The arguments of `ProjectionBlock` that are not tensors of the autograd graph.

    Attributes:
        norm: of the input, and of queries and keys if these have norms.
        qkv: the joined projection.
        heads, groups: number of heads of queries, and of keys and values.
        cos, sin: [s, r] or [b * s, r], FP32 or the input's dtype: rotary embedding of the first r channels of a head.
        dtype: of queries, keys and values; the stream may be wider, under autocast.
        head_norms: number of parameters of the norms of queries and keys, 4 or 0.
        whole_norms: whether these norms are over all heads of a token together, rather than over each.
        saved: how the norm's input is saved for backward.
    """

    norm: Norm
    qkv: LayerGemm
    heads: int
    groups: int
    cos: torch.Tensor
    sin: torch.Tensor
    dtype: torch.dtype
    head_norms: int = 0
    whole_norms: bool = False
    saved: Saved = AS_IT_IS
    ends: Ends = ALONE

    @property
    def first(self) -> LayerGemm:
        return self.qkv

    @property
    def last(self) -> LayerGemm:
        return self.qkv


class ProjectionBlock(torch.autograd.Function):
    """(x [b, s, h], norm weight and bias, joined bias, settings, weights) -> (x, query, key, value), [b, s, heads or groups, d] each.

    The weights are `settings.head_norms` parameters (`HeadNormWeights`), then those of queries, keys and values. The function returns x so
    that the norm's backward kernel can add the gradient of the residual path.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        bias: torch.Tensor | None,
        settings: ProjectionSettings,
        *weights: Any,
    ) -> tuple[torch.Tensor, ...]:
        x2d, qkv = x.view(-1, x.shape[-1]), settings.qkv
        head_norms: tuple[torch.Tensor | None, ...] = weights[: settings.head_norms]
        parts: tuple[ScalingTensor, ...] = weights[settings.head_norms :]
        payloads = [part.payload for part in parts]
        scale_inv = scalar_pool.take(x.device)
        normed = NormWeights(settings.norm, norm_weight, norm_bias).cast(
            x2d, None, slot=qkv.x, cast=qkv.gemm.input, ends=ALONE, scale_inv=scale_inv
        )
        product = qkv.output_rows(scale_inv, qkv.weight(*payloads), bias, settings.dtype)
        packed = product.of(normed.y).view(*x.shape[:-1], -1)
        kept_heads = None
        if settings.head_norms:
            of_heads = HeadNormWeights(*head_norms)  # type: ignore[arg-type]
            kept_heads = HeadNorms(packed, settings.norm, of_heads, settings.heads, settings.groups, apart=True, whole=settings.whole_norms)
        ops.rotary_(packed, settings.cos, settings.sin, settings.heads, settings.groups, apart=True)
        none = x.new_empty(0, dtype=torch.float32)  # of a last layer, which this block does not have
        kept = KeptByBlock(norm_weight, norm_bias, normed.mean, normed.rstd, scale_inv, none, None, payloads[0], bias, none, None)
        of_norms = () if kept_heads is None else kept_heads.take()
        ctx.save_for_backward(*head_norms, *of_norms, *payloads[1:], *settings.saved.keep(x2d), *kept)
        ctx.settings, ctx.heads = settings, kept_heads
        ctx.rows, ctx.weight_dtype = [len(payload) for payload in payloads], parts[0].dtype
        query, key, value = grouped_heads(packed, settings.heads, settings.groups, apart=True)
        return x, query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)

    @staticmethod
    @differentiable_once
    def backward(  # type: ignore[override]
        ctx: Any, grad_x: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        settings, saved = ctx.settings, list(ctx.saved_tensors)
        qkv = settings.qkv
        head_norms = [saved.pop(0) for _ in range(settings.head_norms)]
        if ctx.heads is not None:
            ctx.heads.give([saved.pop(0) for _ in range(HeadNorms.TENSORS)])
        more = [saved.pop(0) for _ in ctx.rows[1:]]
        stream, kept = KeptByBlock.of(saved)
        rotated_back = functools.partial(ops.rotary_backward, dq, dk, dv, settings.cos, settings.sin, apart=True)
        grad, outputs, of_heads = projection_grad(
            qkv, rotated_back, dq.shape[:2], settings.dtype, ctx.heads, head_norms, colsum=kept.first_bias is not None
        )
        del dq, dk, dv, rotated_back
        needed = any(ctx.needs_input_grad[5 + settings.head_norms :])
        grads = finish_backward(
            settings,
            stream,
            kept,
            Inner(grad, outputs.sums, outputs.sums, last_weight=lambda: None, again=None),
            residual=grad_x,
            dtype=settings.dtype,
            weight_dtype=ctx.weight_dtype if needed else None,
            more=more,
        )
        return grads.x, grads.norm_weight, grads.norm_bias, grads.first_bias, None, *of_heads, *rows_of_each(grads.first_weight, ctx.rows)
