"""The MLP half of a transformer layer as one function: residual add, norm, FC1, GELU or SwiGLU, FC2, residual add, all casts fused.

Backward keeps only the residual stream and FC1's output, as `msamp.nn.saved` says. The FP8 operands of the weight gradients
(normalised input, activation) are made again from them, to the same bits where both are kept as they are.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from msamp.kernels import ops, places
from msamp.nn.block import Norm, NormWeights, start_grad_output, vector_gradients
from msamp.nn.ends import ALONE, Ends
from msamp.nn.gemm import LayerGemm, Operand
from msamp.nn.group_scaling import leave_maxima
from msamp.nn.saved import AS_IT_IS, Saved
from msamp.numerics.tensor import ScalingTensor


class MLPSettings(NamedTuple):
    """The arguments that are no tensors of the graph.

    Attributes:
        norm: of the input.
        fc1, fc2: the two linear layers.
        activation: "gelu" (tanh form) or "swiglu".
        recompute: forget FC1's output too, and run FC1 again in backward.
        saved: how the inputs of norm and activation are kept for backward.
        ends: where rows come from and sums go.
    """

    norm: Norm
    fc1: LayerGemm
    fc2: LayerGemm
    activation: str
    recompute: bool
    saved: Saved = AS_IT_IS
    ends: Ends = ALONE


class MLPBlock(torch.autograd.Function):
    """(x, delta, norm weight and bias, FC1 weight and bias, FC2 weight and bias, settings) -> x + delta + MLP(norm(x + delta))."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        delta: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        fc1_weight: ScalingTensor,
        fc1_bias: torch.Tensor | None,
        fc2_weight: ScalingTensor,
        fc2_bias: torch.Tensor | None,
        how: MLPSettings,
    ) -> torch.Tensor:
        x2d, delta2d = x.view(-1, x.shape[-1]), delta.view(-1, x.shape[-1])
        fc1, fc2, ends = how.fc1, how.fc2, how.ends
        n_scale_inv, a_scale_inv = places.take(x.device), places.take(x.device)
        norm = NormWeights(how.norm, norm_weight, norm_bias)
        total, n8, mean, rstd = norm.cast(x2d, delta2d, fc1.x, fc1.gemm.input, ends, n_scale_inv)
        gathered = ends.start_gather(n8, "input all-gather")
        w1 = fc1.weight(fc1_weight.payload)
        n8 = gathered()
        y = fc1.output(Operand.tensorwise(n8, n_scale_inv), w1, fc1_bias, x.dtype)
        a8, _ = ops.activate(y, how.activation, fc2.x.scale, fc2.x.amax, fc2.x_dtype, scale_inv_slot=a_scale_inv)
        if fc2.x.watch is not None:
            fc2.x.watch(ops.activate(y, how.activation, None, None, torch.float32)[0], a8, a_scale_inv)
        a = Operand.tensorwise(a8, a_scale_inv)
        partial = fc2.output(a, fc2.weight(fc2_weight.payload), fc2_bias if ends.adds_bias else None, x.dtype)
        out = ends.sum_output(partial, fc2).add_(total)
        kept = how.saved.keep(total) if how.recompute else (*how.saved.keep(total), *how.saved.keep(y))
        weights = (fc1_weight.payload, fc1_bias, fc2_weight.payload, fc2_bias)
        whole = n8 if ends.keeps_gathered else None
        ctx.save_for_backward(*kept, norm_weight, norm_bias, mean, rstd, n_scale_inv, a_scale_inv, whole, *weights)
        ctx.how, ctx.weight_dtypes = how, (fc1_weight.dtype, fc2_weight.dtype)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *kept, norm_weight, norm_bias, mean, rstd, n_scale_inv, a_scale_inv, whole = ctx.saved_tensors[:-4]
        fc1_weight, fc1_bias, fc2_weight, fc2_bias = ctx.saved_tensors[-4:]
        how, (fc1_dtype, fc2_dtype) = ctx.how, ctx.weight_dtypes
        fc1, fc2, ends, rms, dtype = how.fc1, how.fc2, how.ends, how.norm.rms, grad_output.dtype
        g2d = grad_output.reshape(-1, grad_output.shape[-1])
        parts = len(kept) if how.recompute else len(kept) // 2
        norm = NormWeights(how.norm, norm_weight, norm_bias)
        start_g, fc2_sums = start_grad_output(fc2, grad_output, places.take(g2d.device), ends, colsum=fc2_bias is not None)
        again = None if whole is None else lambda: whole
        if again is None and (how.recompute or ends.spread):
            again = norm.start_again(how.saved.restore(kept[:parts], dtype), n_scale_inv, fc1.x_dtype, ends)
        if how.recompute:
            assert again is not None
            y = fc1.output(Operand.tensorwise(again(), n_scale_inv), fc1.weight(fc1_weight), fc1_bias, dtype)
            again = again if ends.spread else None
        else:
            y = how.saved.restore(kept[parts:], dtype)
        g, h_scale_inv = start_g(), places.take(g2d.device)
        grad_a = fc2.grad_input(g, fc2.weight(fc2_weight, transpose=True), dtype)
        h8, h8_t, _, a8_t, fc1_sums = ops.activate_backward(
            grad_a,
            y,
            how.activation,
            a_scale_inv,
            fc2.x_dtype,
            fc1.grad.scale,
            fc1.grad.amax,
            fc1.grad_dtype,
            colsum=fc1_bias is not None,
            scale_inv_slot=h_scale_inv,
        )
        if fc1.grad.watch is not None:
            wide = ops.activate_backward(grad_a, y, how.activation, a_scale_inv, fc2.x_dtype, None, None, torch.float32)[0]
            fc1.grad.watch(wide, h8, h_scale_inv)
            del wide
        del grad_a, y
        partial = fc1.grad_input(Operand.tensorwise(h8, h_scale_inv), fc1.weight(fc1_weight, transpose=True), dtype)
        grad_n = ends.start_sum_grad(partial, fc1)  # on its way while the weights' gradients are computed
        del h8, partial
        grad_fc2 = fc2.grad_weight(g, Operand.tensorwise(None, a_scale_inv, a8_t), fc2_dtype)
        del g, a8_t
        total = how.saved.restore(kept[:parts], dtype)
        if again is None:
            n8_t = ops.normalize_transposed(total, mean, rstd, norm_weight, norm_bias, n_scale_inv, fc1.x_dtype, rms=rms)
        else:
            n8_t = ops.transpose(again())
        grad_fc1 = fc1.grad_weight(Operand.tensorwise(None, h_scale_inv, h8_t), Operand.tensorwise(None, n_scale_inv, n8_t), fc1_dtype)
        del h8_t, n8_t, again
        grad_x, *norm_sums, maxima = ops.normalize_backward(
            grad_n(), total, mean, rstd, norm_weight, g2d, rms=rms, maxima=fc2.grad_just_in_time
        )
        grad_x = leave_maxima(grad_x.view(grad_output.shape), maxima)
        vectors = (norm_weight, norm_bias, fc1_bias, fc2_bias)
        grad_norm_weight, grad_norm_bias, grad_fc1_bias, grad_fc2_bias = vector_gradients(
            *zip((*norm_sums, fc1_sums, fc2_sums), vectors, strict=True)
        )
        return grad_x, grad_x, grad_norm_weight, grad_norm_bias, grad_fc1, grad_fc1_bias, grad_fc2, grad_fc2_bias, None
