"""Rotary embedding of a packed QKV projection as a function of autograd, for use outside of a fused block."""

from typing import Any

import torch

from msamp.kernels import ops
from msamp.nn.attention_block import split_heads
from msamp.nn.block import CastTransposed
from msamp.nn.differentiable_once import differentiable_once


class RotaryFunction(torch.autograd.Function):
    """(qkv [s, b, (heads + 2 groups) * d], cos and sin FP32 [s, r], heads, groups) -> query [s, b, heads, d], key, value [s, b, groups, d].

    Queries and keys are rotated as `ops.rotary_` says, in the memory of `qkv`, which must be contiguous: the three are views of it, but
    for the query where a group has several heads. The version of `qkv` counts the change, so that autograd refuses a graph that has kept
    it as it was. Backward keeps the angles alone and writes the gradient of `qkv` at once.

    Raises:
        ValueError: for shapes that do not fit together, and where `qkv` is not contiguous.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, groups: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not qkv.is_contiguous():
            raise ValueError(f"qkv has strides {qkv.stride()}; it is rotated where it lies and must be contiguous: call contiguous() first")
        rotated = qkv.detach()
        ops.rotary_(rotated, cos, sin, heads, groups)
        torch.autograd.graph.increment_version(qkv)  # the kernel writes behind torch's back
        ctx.save_for_backward(cos, sin)
        return split_heads(rotated, heads, groups)

    @staticmethod
    @differentiable_once
    def backward(  # type: ignore[override]
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        made = CastTransposed(*ops.rotary_backward(dq, dk, dv, cos, sin, scale=None, amax_slot=None, dtype=dq.dtype))
        return made.payload.view(*dq.shape[:2], -1), None, None, None, None
