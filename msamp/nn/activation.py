"""GELU, SwiGLU and squared ReLU for use outside a fused block; they save their input as `msamp.nn.saved_activations` defines."""

from typing import Any

import torch
from torch import nn

from msamp.kernels import ops
from msamp.nn.block import Activated, ActivationGradient, unviewed
from msamp.nn.differentiable_once import differentiable_once
from msamp.nn.saved_activations import IN_GROUPS, Saved


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
