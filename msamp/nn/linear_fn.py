"""An FP8 linear layer as one autograd function (FP8-LM section 2): E4M3 forward, E5M2 backward. Its GEMMs are those of `msamp.nn.gemm`."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from msamp.nn.block import unviewed
from msamp.nn.gemm import LayerGemm, Operand, cast_operand
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.tensor import ScalingTensor


class LinearFunction(torch.autograd.Function):
    """y = x W^T + b with FP8 operands.

    Backward keeps the FP8 input, transposed as grad_weight's GEMM wants it, 1 byte an element, and the weight's stored payload, which is
    cast again to the same bits. No FP8 or transposed copy of a weight outlives its GEMM.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: ScalingTensor, bias: torch.Tensor | None, layer: LayerGemm
    ) -> torch.Tensor:
        operand = cast_operand(x.reshape(-1, x.shape[-1]), layer.x, layer.gemm.input, col=ctx.needs_input_grad[1])
        y = layer.output(operand, layer.weight(weight.payload), bias, x.dtype)
        ctx.save_for_backward(operand.payload_t, operand.scale_inv_t, weight.payload)
        ctx.layer, ctx.shape, ctx.weight_dtype = layer, x.shape, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return unviewed(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        payload_t, scale_inv_t, w_payload = ctx.saved_tensors
        layer, (needs_x, needs_w, needs_b, _) = ctx.layer, ctx.needs_input_grad
        g2d = grad_output.reshape(-1, grad_output.shape[-1])
        grad_x = grad_w = grad_b = None
        if needs_x or needs_w:
            g = cast_operand(g2d, layer.grad, layer.gemm.grad_output, col=needs_w)
        if needs_w:
            grad_w = layer.grad_weight(g, Operand.kept(payload_t, scale_inv_t, layer.gemm.input), ctx.weight_dtype)
        if needs_x:
            grad_x = layer.grad_input(g, layer.weight(w_payload, transpose=True), grad_output.dtype).view(ctx.shape)
        if needs_b and ctx.bias_dtype is not None:
            # Either way torch adds up in FP32; into its own dtype it is one launch less.
            grad_b = g2d.sum(0, dtype=None if g2d.dtype == ctx.bias_dtype else torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_w, grad_b, None


def activation(x: torch.Tensor) -> torch.Tensor:
    """The input of a linear layer, under autocast in the autocast dtype; ValueError where a layer does not take its dtype."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"input is {x.dtype}; an FP8 linear layer takes torch.bfloat16, torch.float16 or torch.float32")
    return x


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: LinearScaling) -> torch.Tensor:
    """FP8 linear `x @ weight.T + bias`; with a plain weight, as a float copy of a model has it, torch's own.

    Args:
        x: [..., K] BF16, FP16 or FP32; under autocast it is taken in the autocast dtype.
        weight: [N, K] FP16-scaled or E4M3; or plain.
        bias: [N] or None.
        scaling: the layer's scales; histories are recorded while gradients are enabled.

    Returns:
        [..., N] in the dtype of `x`.
    """
    if not isinstance(weight, ScalingTensor):
        return torch.nn.functional.linear(x, weight, bias)
    return LinearFunction.apply(activation(x), weight, bias, LayerGemm.of(scaling, weight))
