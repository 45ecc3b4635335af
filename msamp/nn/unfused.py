"""LayerNorm, RMSNorm, GELU, SwiGLU, squared ReLU and rotary embedding for use outside a fused block.

Norms and activations save their input for backward as `msamp.nn.saved_activations` defines.
"""

from typing import Any

import torch
from torch import nn

from msamp.kernels import ops
from msamp.nn.attention_block import split_heads
from msamp.nn.block import Activated, ActivationGradient, CastTransposed, Norm, NormGradients, NormWeights, unviewed, vector_gradients
from msamp.nn.differentiable_once import differentiable_once
from msamp.nn.saved_activations import IN_GROUPS, Saved


class NormFunction(torch.autograd.Function):
    """(x [.., N], weight [N], bias [N] or None, eps, rms, how x is saved) -> y like x; it also saves one or two FP32 numbers per row."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, rms: bool, saved: Saved
    ) -> torch.Tensor:
        x2d = x.reshape(-1, x.shape[-1])
        normed = NormWeights(Norm(eps, rms), weight, bias).run(x2d, scale=None, amax_slot=None, dtype=x.dtype)
        ctx.save_for_backward(*saved.keep(x2d), weight, bias, normed.mean, normed.rstd)
        ctx.rms, ctx.saved = rms, saved
        return unviewed(normed.y, x.shape)

    @staticmethod
    def saved_bytes(hidden: float, wide: int, saved: Saved) -> float:
        """Return the bytes per token saved for backward, without the statistics (8 bytes), for `wide` bytes per element of the input."""
        return hidden * saved.element_bytes(wide)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *kept, weight, bias, mean, rstd = ctx.saved_tensors
        g2d = grad_y.reshape(-1, grad_y.shape[-1])
        x2d = ctx.saved.restore(kept, grad_y.dtype)
        gradients = NormGradients(*ops.normalize_backward(g2d, x2d, mean, rstd, weight, grad_residual=None, rms=ctx.rms))
        of_vectors = vector_gradients((gradients.weight_sums, weight), (gradients.bias_sums, bias))
        return gradients.x.view(grad_y.shape), *of_vectors, None, None, None


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm over the last dimension, with weight (and bias).

    Args:
        size: of the last dimension.
        saved: how the input is saved for backward.
        settings: torch.nn.LayerNorm's eps, bias, device and dtype.

    Shape: [.., size] -> the same, in the input's dtype: FP32, BF16 or FP16.
    """

    def __init__(self, size: int, saved: Saved = IN_GROUPS, **settings: Any) -> None:
        super().__init__(size, **settings)
        self.saved = saved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NormFunction.apply(x, self.weight, self.bias, self.eps, False, self.saved)


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm over the last dimension, with the arguments and shape of `LayerNorm`.

    `eps` is required; torch would default to the epsilon of the input's dtype.
    """

    def __init__(self, size: int, eps: float, saved: Saved = IN_GROUPS, **settings: Any) -> None:
        super().__init__(size, eps=eps, **settings)
        self.epsilon, self.saved = eps, saved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NormFunction.apply(x, self.weight, None, self.epsilon, True, self.saved)


class ActivationFunction(torch.autograd.Function):
    """(y [.., F], the kind of activation, how y is saved) -> [.., F], or [.., F / 2] for SwiGLU; see `msamp.kernels.reference.activate`."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, kind: str, saved: Saved) -> torch.Tensor:  # type: ignore[override]
        y2d = y.reshape(-1, y.shape[-1])
        ctx.save_for_backward(*saved.keep(y2d))
        ctx.kind, ctx.saved, ctx.shape = kind, saved, y.shape
        return unviewed(Activated(*ops.activate(y2d, kind, scale=None, amax_slot=None, dtype=y.dtype)).payload, (*y.shape[:-1], -1))

    @staticmethod
    def saved_bytes(width: float, wide: int, saved: Saved) -> float:
        """Return the bytes per token saved for backward, for an input of that width and `wide` bytes per element."""
        return width * saved.element_bytes(wide)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_a: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        dtype = grad_a.dtype
        y2d = ctx.saved.restore(ctx.saved_tensors, dtype)
        unscaled = y2d.new_empty(0, dtype=torch.float32)  # the result was not cast to an FP8 operand
        g2d = grad_a.reshape(-1, grad_a.shape[-1])
        options: dict[str, Any] = {"a_scale_inv": unscaled, "a_dtype": dtype, "scale": None, "amax_slot": None, "dtype": dtype}
        gradient = ActivationGradient(*ops.activate_backward(g2d, y2d, ctx.kind, **options))
        return gradient.payload.view(ctx.shape), None, None


class Activation(nn.Module):
    """GELU (tanh form), SwiGLU or squared ReLU.

    Args:
        kind: "gelu"; "swiglu": silu of the first half of the channels times the second half; "squared-relu": max(y, 0)^2.
        saved: how the input is saved for backward.

    Shape: [.., F] -> [.., F], or [.., F / 2] for SwiGLU, in the input's dtype: FP32, BF16 or FP16.

    Raises:
        ValueError: at the first call, if `kind` is unknown, or F is odd for SwiGLU.
    """

    def __init__(self, kind: str, saved: Saved = IN_GROUPS) -> None:
        super().__init__()
        self.kind, self.saved = kind, saved

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return ActivationFunction.apply(y, self.kind, self.saved)


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
