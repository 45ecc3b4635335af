"""LayerNorm and RMSNorm for use outside a fused block; they save their input for backward as `msamp.nn.saved_activations` defines."""

from typing import Any

import torch
from torch import nn

from msamp.kernels import ops
from msamp.nn.block import Norm, NormGradients, NormWeights, unviewed, vector_gradients
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
