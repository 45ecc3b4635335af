"""The three GEMMs of an FP8 linear layer as one autograd function (FP8-LM section 2): E4M3 forward, E5M2 backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from msamp.kernels import ops
from msamp.nn.scaling_state import LinearScaling, Slot
from msamp.numerics.formats import Format
from msamp.numerics.recipe import Gemm
from msamp.numerics.tensor import ScalingTensor


def quantize_operand(
    x: torch.Tensor, slot: Slot, fmt: Format, transpose: bool, combine: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """One tensor of a linear layer in FP8, with its slot's scale or just in time; its amax enters the slot.

    Args:
        x: [M, N] BF16, FP16 or FP32.
        slot: of the scale and the amax; its watch is told.
        fmt: E4M3 or E5M2.
        transpose: give the transpose too.
        combine: makes of a just-in-time amax (FP32, 0-dim) that of all ranks who must share the scale; a slot's own is shared already.

    Returns:
        Payload [M, N], its transpose [N, M] or None, and scale_inv (FP32, 0-dim, a copy; NaN where `x` is not finite).
    """
    if combine is None or slot.scale is not None:
        payload, payload_t, scale_inv, _ = ops.cast_transpose(x, slot.scale, slot.amax, fmt.dtype, row=True, col=transpose)
    else:
        amax = combine(ops.amax(x))
        if slot.amax is not None:
            slot.amax.copy_(torch.maximum(slot.amax, amax))
        scale = ops.scale_from_amax(amax, fmt.max, None, 1.0)
        payload, payload_t, scale_inv, _ = ops.cast_transpose(x, scale, None, fmt.dtype, row=True, col=transpose)
        scale_inv = torch.add(scale_inv, amax, alpha=0)  # NaN on every rank where any rank's share is not finite
    if slot.watch is not None:
        slot.watch(x, payload, scale_inv)
    return payload, payload_t if transpose else None, scale_inv


def weight_operand(payload: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, transpose: bool) -> torch.Tensor:
    """The FP8 weight from what is stored: [N, K], or its transpose [K, N] for grad_input, row-major either way."""
    if payload.dtype == dtype:
        return ops.transpose(payload) if transpose else payload
    if transpose:
        return ops.cast_transpose(payload, multiplier, None, dtype, col=True)[1]
    return ops.cast(payload, multiplier, dtype)


class LinearFunction(torch.autograd.Function):
    """y = x W^T + b with FP8 operands.

    Saved for backward: the FP8 input, already transposed as grad_weight's GEMM wants it (1 byte an element), and the
    weight's stored payload, cast again in backward to the same bits: no FP8 or transposed copy of a weight outlives its GEMM.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: ScalingTensor,
        bias: torch.Tensor | None,
        gemm: Gemm,
        slots: tuple[Slot, Slot],
        weight_scales: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        x_slot, ctx.grad_slot = slots
        multiplier, w_scale_inv = weight_scales
        x2d = x.reshape(-1, x.shape[-1])
        x8, x8_t, x_scale_inv = quantize_operand(x2d, x_slot, gemm.input.format, transpose=ctx.needs_input_grad[1])
        w8 = weight_operand(weight.payload, multiplier, gemm.weight.format.dtype, transpose=False)
        y = ops.scaled_mm(x8, w8, x_scale_inv, w_scale_inv, None if bias is None else bias.to(x.dtype), x.dtype, fast_accum=True)
        ctx.save_for_backward(x8_t, x_scale_inv, weight.payload, multiplier, w_scale_inv)
        ctx.gemm, ctx.shape, ctx.weight_dtype = gemm, x.shape, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x8_t, x_scale_inv, w_payload, multiplier, w_scale_inv = ctx.saved_tensors
        gemm = ctx.gemm
        g2d = grad_output.reshape(-1, grad_output.shape[-1])
        grad_x = grad_w = grad_b = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            g8, g8_t, scale_inv = quantize_operand(g2d, ctx.grad_slot, gemm.grad_output.format, transpose=ctx.needs_input_grad[1])
        if ctx.needs_input_grad[1]:
            assert g8_t is not None
            grad_w = ops.scaled_mm(g8_t, x8_t, scale_inv, x_scale_inv, None, ctx.weight_dtype, fast_accum=False)
        if ctx.needs_input_grad[0]:
            w8_t = weight_operand(w_payload, multiplier, gemm.weight.format.dtype, transpose=True)
            grad_x = ops.scaled_mm(g8, w8_t, scale_inv, w_scale_inv, None, grad_output.dtype, fast_accum=False).view(ctx.shape)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_b = g2d.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_w, grad_b, None, None, None


def activation(x: torch.Tensor) -> torch.Tensor:
    """The input of a linear layer, under autocast in the autocast dtype; ValueError where a layer does not take its dtype."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"input is {x.dtype}; an FP8 linear layer takes torch.bfloat16, torch.float16 or torch.float32")
    return x


def linear(x: torch.Tensor, weight: ScalingTensor, bias: torch.Tensor | None, scaling: LinearScaling) -> torch.Tensor:
    """FP8 linear `x @ weight.T + bias`.

    Args:
        x: [..., K] BF16, FP16 or FP32; under autocast it is taken in the autocast dtype.
        weight: [N, K] FP16-scaled or E4M3.
        bias: [N] or None.
        scaling: the layer's scales; histories are recorded while gradients are enabled.

    Returns:
        [..., N] in the dtype of `x`.
    """
    x = activation(x)
    x_slot, grad_slot = scaling.slots(record=torch.is_grad_enabled())[:2]
    return LinearFunction.apply(x, weight, bias, scaling.gemm, (x_slot, grad_slot), scaling.weight_scales(weight))
