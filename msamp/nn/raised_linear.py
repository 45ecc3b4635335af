"""A linear layer that a guard has raised: its product in BF16, and next to it the casts to FP8 that it would have.

`msamp.nn.precision_guard` raises a layer whose FP8 casts lose too much. The layer then computes

    y = bf16(x) W^T + b         W: the values of the stored weight, whatever its format, rounded to BF16

and its two gradients from the same BF16 operands. The stored weight, its master and its gradient's format do not change, so a checkpoint,
an export and the optimizer do not know the difference, and the layer can return to FP8 after any step. At O3 only the
weight's storage error in E4M3 remains; inputs and output gradients are no longer cast.

For the layer to return, its casts must be known although they are not used. So each step records the amaxes of input and grad_output, from
which delayed scales follow, and a step that measures (`TensorScales.checks`) casts both to FP8 besides, with the scales that the FP8 GEMMs
would have. That cast is one read in ordinary steps, and its result is dropped.
"""

from typing import Any

import torch

from msamp.kernels.scaled_mm import bf16_linear
from msamp.nn.block import unviewed
from msamp.nn.cast_scales import CastScales
from msamp.nn.channel_scales import ChannelSlots
from msamp.nn.differentiable_once import differentiable_once
from msamp.nn.gemm import cast_operand
from msamp.nn.scaling_state import GRAD_OUTPUT, INPUT, WIRE, LinearScaling
from msamp.numerics.recipe import Cast
from msamp.numerics.tensor import ScalingTensor


def raised_linear(x: torch.Tensor, weight: ScalingTensor, bias: torch.Tensor | None, scaling: LinearScaling) -> torch.Tensor:
    """Compute `x @ weight.T + bias` in BF16, and record what the casts to FP8 would be.

    Args:
        x: [..., K] BF16, FP16 or FP32.
        weight: [N, K] in its stored format.
        bias: [N] or None.
        scaling: the layer's scales, whose histories are recorded while gradients are enabled.

    Returns:
        [..., N] in the dtype of `x`.
    """
    observed = observe_input(x, scaling)
    return observe_output(bf16_linear(observed, bf16_weight(weight), bias), scaling)


def bf16_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the values of a stored weight [N, K] in BF16. Its backward passes the gradient on, in the weight's outer dtype."""
    return _Values.apply(weight)


def observe_input(x: torch.Tensor, scaling: LinearScaling, *, sums: bool = False) -> torch.Tensor:
    """Return `x` [..., K], after recording its cast to FP8.

    sums: whether the layer would send partial sums of this input's gradient in FP8; backward then records the gradient's amax for their
        scale. It is the amax of the sum, while FP8 would scale the parts.
    """
    record = torch.is_grad_enabled()
    slots, channels = scaling.slots(record=record), scaling.channel_slots(record=record)
    return _Input.apply(x, slots[INPUT], scaling.gemm.input, channels, slots[WIRE] if sums else None)


def observe_output(y: torch.Tensor, scaling: LinearScaling, *, sums: bool = False) -> torch.Tensor:
    """Return `y` [..., N], which nothing else may hold; its backward records the cast of grad_output.

    sums: whether `y` is a partial sum that the layer would send in FP8; its amax is then recorded for their scale.
    """
    slots = scaling.slots(record=torch.is_grad_enabled())
    if sums:
        slots[WIRE].record(_rows(y))
    return _Output.apply(y, slots[GRAD_OUTPUT], scaling.gemm.grad_output)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1])


def _observe(x: torch.Tensor, slot: CastScales, cast: Cast, channels: ChannelSlots | None = None) -> None:
    """Record the amax of `x` [M, K] in its slot, and call the slot's watch with its cast."""
    if channels is not None:
        x, slot = channels.smooth(x, slot)
    if slot.watch is not None:
        cast_operand(x, slot, cast)
    else:
        slot.record(x)


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: ScalingTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.dtype, ctx.label = weight.dtype, weight.label
        return weight.dequantize(torch.bfloat16)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.to(ctx.dtype)


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, slot: CastScales, cast: Cast, channels: ChannelSlots | None, sums: CastScales | None
    ) -> torch.Tensor:
        _observe(_rows(x), slot, cast, channels)
        ctx.sums = sums
        return x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if ctx.sums is not None:
            ctx.sums.record(_rows(grad))
        return grad, None, None, None, None


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, slot: CastScales, cast: Cast) -> torch.Tensor:  # type: ignore[override]
        ctx.slot, ctx.cast = slot, cast
        return unviewed(y, y.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        _observe(_rows(grad), ctx.slot, ctx.cast)
        return grad, None, None
