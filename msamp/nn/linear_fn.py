"""An FP8 linear layer as one autograd function (FP8-LM section 2): E4M3 in forward, E5M2 in backward, with the GEMMs of `msamp.nn.gemm`.

The same function implements a layer on one GPU and both kinds of tensor-parallel layers. They differ only at the two ends
(`msamp.nn.ends`):

    layer             input end                               output end
    on one GPU        `ALONE`                                 `ALONE`
    column-parallel   all-gather of x, sum of grad_input      `ALONE`
    row-parallel      `ALONE`                                 sum of y, all-gather of grad_output
"""

from typing import Any, NamedTuple

import torch

from msamp.kernels import ops
from msamp.nn.block import unviewed
from msamp.nn.differentiable_once import check_transforms, differentiable_once
from msamp.nn.ends import ALONE, Ends, PendingRows, ReadyRows
from msamp.nn.gemm import LayerGemm, Operand, cast_operand
from msamp.nn.raised_linear import raised_linear
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.recipe import Cast
from msamp.numerics.tensor import ScalingTensor


class LinearSettings(NamedTuple):
    """The arguments that are not tensors of the autograd graph: the layer's GEMMs, the communication at its two ends, its name, and whether
    backward casts the input again, which something else saves anyway."""

    layer: LayerGemm
    input_end: Ends = ALONE
    output_end: Ends = ALONE
    label: str = ""
    cast_again: bool = False


class LinearFunction(torch.autograd.Function):
    """y = x W^T + b with FP8 operands.

    Saved for backward is the FP8 input, 1 byte per element: transposed, as grad_weight's GEMM reads it, or, if the input end gathers rows,
    this rank's rows or all of them. The weight's stored payload is saved too, and cast again to the same bits. No FP8 or transposed copy of
    a weight outlives its GEMM.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: ScalingTensor, bias: torch.Tensor | None, settings: LinearSettings
    ) -> torch.Tensor:
        layer, ins, outs, label, again = settings
        needs_w = ctx.needs_input_grad[1]
        combine = ins.shared_amax if ins.spread else None
        x2d, slot, channels = x.reshape(-1, x.shape[-1]), layer.x, layer.channel_scale
        if layer.channels is not None:
            x2d, slot = layer.channels.smooth(x2d, slot)
        operand = cast_operand(x2d, slot, layer.gemm.input, col=needs_w and not ins.spread and not again, combine=combine)
        saved = x2d if again and needs_w else operand.payload_t
        gathered = ins.start_gather(operand.codes, "input all-gather") if ins.spread else None
        w = layer.weight(weight.payload)
        if gathered is not None:
            y = gathered.product(layer.output_rows(operand.scale_inv, w, bias, x.dtype))
            if needs_w:
                saved = gathered.keep() if ins.keeps_gathered else operand.codes
            gathered.done()
        elif outs is ALONE:
            y = layer.output(operand, w, bias, x.dtype)
        else:
            y = outs.sum_output(layer.output_rows(operand.scale_inv, w, bias, x.dtype), operand.codes, layer)
        # A copy of the channels' scales: the end of the step, which may come before this backward, writes them.
        ctx.save_for_backward(saved, operand.scale_inv_t, weight.payload, channels.clone() if channels is not None and needs_w else None)
        ctx.settings, ctx.label, ctx.shape, ctx.weight_dtype = settings, label, x.shape, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        rows: tuple[int, ...] = x.shape[:-1]
        if ins.spread or outs.spread:  # dim 0 is gathered at the input end or scattered at the output end
            rows = (x.shape[0] * ins.ranks if ins.spread else x.shape[0] // outs.ranks, *x.shape[1:-1])
        return unviewed(y, (*rows, y.shape[-1]))

    @staticmethod
    def saved_bytes(inputs: float, cast: Cast) -> float:
        """Return the bytes per token saved for backward: the cast input of that width."""
        return inputs * cast.element_bytes

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        saved, x_scale_inv, w_payload, channels = ctx.saved_tensors
        (layer, ins, outs, _, again), (needs_x, needs_w, needs_b, _) = ctx.settings, ctx.needs_input_grad
        grad_x = grad_w = grad_b = gathered = None
        x8: PendingRows | None = None  # the rows of x in FP8, where this rank has only its own
        if needs_w and ins.spread:
            x8 = ReadyRows(saved) if ins.keeps_gathered else ins.start_gather(saved, "input all-gather again")
        g2d = grad_output.reshape(-1, grad_output.shape[-1])
        if needs_x or needs_w:
            combine = outs.shared_amax if outs.spread else None
            g = cast_operand(g2d, layer.grad, layer.gemm.grad_output, col=needs_w and not outs.spread, combine=combine)
            gathered = outs.start_gather(g.codes, "grad_output all-gather") if outs.spread else None
        if needs_x:
            w, dtype = layer.weight(w_payload, transpose=True), grad_output.dtype
            partial = layer.grad_input(g, w, dtype) if gathered is None else gathered.product(layer.grad_input_rows(g.scale_inv, w, dtype))
            del w
            summed = ins.start_sum_grad(partial, layer)  # the collective overlaps with the weight gradient
        if needs_w:
            g = g if gathered is None else g._replace(payload_t=ops.transpose(gathered()))
            kept = ops.cast_transposed(saved, x_scale_inv, layer.x_dtype) if again else saved
            x8_t = kept if x8 is None else ops.transpose(x8())
            if x8 is not None:
                x8.done()
            grad_w = layer.grad_weight(g, Operand.kept(x8_t, x_scale_inv, layer.gemm.input), ctx.weight_dtype, channels)
        if gathered is not None:
            gathered.done()
        if needs_b and ctx.bias_dtype is not None:
            # torch accumulates in FP32 either way; a sum in the gradient's own dtype saves a launch.
            grad_b = g2d.sum(0, dtype=None if g2d.dtype == ctx.bias_dtype else torch.float32).to(ctx.bias_dtype)
        if needs_x:
            grad_x = summed().view(ctx.shape)
        return grad_x, grad_w, grad_b, None


def activation(x: torch.Tensor) -> torch.Tensor:
    """Return the input of a linear layer, cast to the autocast dtype under autocast; ValueError for an unsupported dtype."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"input is {x.dtype}; an FP8 linear layer takes torch.bfloat16, torch.float16 or torch.float32")
    return x


def checked_label(weight: ScalingTensor, x: torch.Tensor) -> str:
    """Run `check_transforms` on `x` and return the name of the weight, for messages; "" while torch.compile traces."""
    if torch.compiler.is_compiling():
        return ""
    check_transforms(weight.label, x)
    return weight.label


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: LinearScaling) -> torch.Tensor:
    """Compute `x @ weight.T + bias` in FP8; in BF16 while the layer is raised (`msamp.nn.raised_linear`); or by
    torch.nn.functional.linear if the weight is plain, as in a float copy of a model.

    Args:
        x: [..., K] BF16, FP16 or FP32; under autocast it is cast to the autocast dtype.
        weight: [N, K] FP16-scaled or E4M3; or plain.
        bias: [N] or None.
        scaling: the layer's scales; histories are recorded while gradients are enabled.

    Returns:
        [..., N] in the dtype of `x`.
    """
    if not isinstance(weight, ScalingTensor):
        return torch.nn.functional.linear(x, weight, bias)
    label = checked_label(weight, x)
    if scaling.shape is None:
        scaling.note(x, weight)
    if scaling.raised:
        return raised_linear(activation(x), weight, bias, scaling)
    return LinearFunction.apply(activation(x), weight, bias, LinearSettings(LayerGemm.of(scaling, weight), label=label))
