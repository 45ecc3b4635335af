"""Rotary embedding of a packed QKV projection as an autograd function, for use outside a fused block."""

from typing import Any

import torch

from msamp.kernels import ops
from msamp.nn.attention_block import split_heads
from msamp.nn.block import CastTransposed
from msamp.nn.differentiable_once import differentiable_once


class RotaryFunction(torch.autograd.Function):
    """(qkv [s, b, (heads + 2 groups) * d], cos and sin FP32 [s, r], heads, groups) -> query [s, b, heads, d], key, value [s, b, groups, d].

    It rotates queries and keys in the memory of `qkv` by `ops.rotary_`. The three results are views of `qkv`, except for the query if a
    group has several heads. The version counter of `qkv` is incremented, so that autograd raises if another function saved it before. Only
    the angles are saved for backward, which writes the whole gradient of `qkv` with one kernel.

    Raises:
        ValueError: if shapes do not match, or `qkv` is not contiguous.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, groups: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not qkv.is_contiguous():
            raise ValueError(f"qkv has strides {qkv.stride()}; it is rotated in place and must be contiguous: call contiguous() first")
        rotated = qkv.detach()
        ops.rotary_(rotated, cos, sin, heads, groups)
        torch.autograd.graph.increment_version(qkv)  # torch does not see the kernel's write
        ctx.save_for_backward(cos, sin)
        return split_heads(rotated, heads, groups)

    @staticmethod
    @differentiable_once
    def backward(  # type: ignore[override]
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        cast = CastTransposed(*ops.rotary_backward(dq, dk, dv, cos, sin, scale=None, amax_slot=None, dtype=dq.dtype))
        return cast.payload.view(*dq.shape[:2], -1), None, None, None, None
