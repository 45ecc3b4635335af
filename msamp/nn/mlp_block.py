"""The MLP half of a transformer layer as one autograd function: residual add, norm, FC1, activation, FC2, residual add, casts fused.

Only the residual stream and FC1's output are saved for backward, as `msamp.nn.saved_activations` defines. Backward recomputes from them the
FP8 operands of the weight gradients (normalized input, activation), bit for bit if both are saved unrounded.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from msamp.kernels import ops, scalar_pool
from msamp.nn import block
from msamp.nn.differentiable_once import differentiable_once
from msamp.nn.ends import ALONE, Ends
from msamp.nn.gemm import LayerGemm, Operand
from msamp.nn.saved_activations import AS_IT_IS, Saved, SavedBytes
from msamp.numerics.tensor import ScalingTensor


class MLPSettings(NamedTuple):
    """The arguments of `MLPBlock` that are not tensors of the autograd graph.

    Attributes:
        norm: of the input.
        fc1, fc2: the two linear layers.
        activation: "gelu" (tanh form), "swiglu" or "squared-relu".
        recompute: do not save FC1's output; backward runs FC1 again.
        saved: how the inputs of norm and activation are saved for backward.
        ends: the communication of tensor parallelism at the block's input and output.
    """

    norm: block.Norm
    fc1: LayerGemm
    fc2: LayerGemm
    activation: str
    recompute: bool
    saved: Saved = AS_IT_IS
    ends: Ends = ALONE

    @property
    def first(self) -> LayerGemm:
        return self.fc1

    @property
    def last(self) -> LayerGemm:
        return self.fc2


class MLPBlock(torch.autograd.Function):
    """(x, delta, norm weight and bias, FC1 weight and bias, FC2 weight and bias, settings, weights) -> x + delta + MLP(norm(x + delta)).

    GEMMs have results in the dtype of delta, which under autocast is not the stream's. The weights are those whose rows follow FC1's in its
    GEMM (`LayerGemm.more`), or none; FC1's bias is for all of them.
    """

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
        settings: MLPSettings,
        *more: ScalingTensor,
    ) -> torch.Tensor:
        x2d, delta2d = x.view(-1, x.shape[-1]), delta.view(-1, x.shape[-1])
        fc1, fc2, ends = settings.fc1, settings.fc2, settings.ends
        n_scale_inv, a_scale_inv = scalar_pool.take(x.device), scalar_pool.take(x.device)
        norm = block.NormWeights(settings.norm, norm_weight, norm_bias)
        normed = norm.cast(x2d, delta2d, slot=fc1.x, cast=fc1.gemm.input, ends=ends, scale_inv=n_scale_inv)
        gathered = ends.start_gather(normed.y, "input all-gather")
        w1 = fc1.weight(fc1_weight.payload, *(w.payload for w in more))
        y = gathered.product(fc1.output_rows(n_scale_inv, w1, fc1_bias, delta.dtype))
        whole = gathered.keep() if ends.keeps_gathered else None
        gathered.done()

        def activated(**options: Any) -> torch.Tensor:
            return block.Activated(*ops.activate(y, kind=settings.activation, **options)).payload

        # Smooth-SwiGLU: the kernel multiplies the channels of the activation, and `fc2.weight` divides the weight's columns.
        channels, channel_amax = fc2.channels or (None, None)
        slots = {"scale_inv_slot": a_scale_inv, "channel_scale": channels, "channel_amax_slot": channel_amax}
        a8 = activated(scale=fc2.x.scale, amax_slot=fc2.x.amax, dtype=fc2.x_dtype, **slots)
        if fc2.x.watch is not None:
            fc2.x.watch(activated(scale=None, amax_slot=None, dtype=torch.float32, channel_scale=channels), a8, a_scale_inv)
        product = fc2.output_rows(a_scale_inv, fc2.weight(fc2_weight.payload), fc2_bias if ends.adds_bias else None, delta.dtype)
        out = ends.sum_output(product, a8, fc2)
        out = out.add_(normed.total) if delta.dtype == x.dtype else out + normed.total
        stream = settings.saved.keep(normed.total)
        weights = (fc1_weight.payload, fc1_bias, fc2_weight.payload, fc2_bias)
        kept = block.KeptByBlock(norm_weight, norm_bias, normed.mean, normed.rstd, n_scale_inv, a_scale_inv, whole, *weights)
        if channels is not None:
            channels = channels.clone()  # the end of the step, which may come before this backward, writes them
        parts = (*stream, *(() if settings.recompute else settings.saved.keep(y)))
        ctx.save_for_backward(*(w.payload for w in more), *parts, *kept, channels)
        ctx.settings, ctx.weight_dtypes = settings, (fc1_weight.dtype, fc2_weight.dtype)
        ctx.dtype, ctx.rows = delta.dtype, [w.shape[0] for w in (fc1_weight, *more)]
        return block.unviewed(out, x.shape)

    @staticmethod
    def saved_bytes(
        hidden: float, width: float, wide: int, saved: Saved, *, ranks: int = 1, gathered: bool = False, recompute: bool = False
    ) -> SavedBytes:
        """Return the memory saved for backward, see `SavedBytes`.

        Args:
            hidden: of the residual stream.
            width: FC1's outputs on this rank.
            wide: bytes per element of the stream.
            saved, recompute: as in `MLPSettings`.
            ranks, gathered: number of ranks that share the rows, and whether the gathered input is saved.
        """
        size = saved.element_bytes(wide)
        return SavedBytes(size * hidden / ranks + hidden * gathered, 0.0 if recompute else size * width)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *saved, channels = ctx.saved_tensors
        more, (parts, kept) = saved[: len(ctx.rows) - 1], block.KeptByBlock.of(saved[len(ctx.rows) - 1 :])
        settings, (*_, needs_fc2, _, _), needs_more = ctx.settings, ctx.needs_input_grad[:9], ctx.needs_input_grad[9:]
        first = ctx.weight_dtypes[0] if ctx.needs_input_grad[4] or any(needs_more) else None
        last = ctx.weight_dtypes[1] if needs_fc2 else None
        grads = block.finish_backward(
            settings,
            parts if settings.recompute else parts[: len(parts) // 2],
            kept,
            _inner(settings, parts, kept, channels, grad_output, ctx.dtype, last, more),
            residual=grad_output,
            dtype=ctx.dtype,
            weight_dtype=first,
            more=more,
        )
        grad_fc1, *of_more = block.rows_of_each(grads.first_weight, ctx.rows)
        return grads.x, *grads._replace(first_weight=grad_fc1), None, *of_more


def _inner(
    settings: MLPSettings,
    parts: Sequence[torch.Tensor],
    kept: block.KeptByBlock,
    channels: torch.Tensor | None,
    grad_output: torch.Tensor,
    dtype: torch.dtype,
    fc2_dtype: torch.dtype | None,
    more: Sequence[torch.Tensor],
) -> block.Inner:
    """Backward through FC2 and the activation. `parts` are the saved parts of the stream, then of FC1's output; `channels` are the
    scales of the activation's channels in forward."""
    fc1, fc2, ends, device = settings.fc1, settings.fc2, settings.ends, grad_output.device
    stream = parts if settings.recompute else parts[: len(parts) // 2]
    grad_y = block.start_grad_output(fc2, grad_output, scalar_pool.take(device), ends, colsum=kept.last_bias is not None)
    again = block.start_input_again(settings, stream, kept, grad_output.dtype, asked=settings.recompute)
    if settings.recompute:
        assert again is not None
        x8 = Operand.tensorwise(again(), scale_inv=kept.input_scale_inv)
        y = fc1.output(x8, fc1.weight(kept.first_weight, *more), kept.first_bias, dtype)
        again = again if ends.spread else None
    else:
        y = settings.saved.restore(parts[len(stream) :], dtype)
    grad_a = grad_y.rows.product(fc2.grad_input_rows(grad_y.scale_inv, fc2.weight(kept.last_weight, transpose=True), dtype))
    g = grad_y.transposed()

    def through_activation(**options: Any) -> block.ActivationGradient:
        a: dict[str, Any] = {"kind": settings.activation, "a_scale_inv": kept.last_scale_inv, "a_dtype": fc2.x_dtype}
        return block.ActivationGradient(*ops.activate_backward(grad_a, y, channel_scale=channels, **a, **options))

    grad, outputs = block.first_grad_output(fc1, through_activation, colsum=kept.first_bias is not None, device=device)

    def grad_fc2() -> torch.Tensor | None:
        if fc2_dtype is None:
            return None
        activated_t = outputs.activated_t
        if fc2.in_bf16:
            activated_t = block.Activated(*ops.activate(y, settings.activation, scale=None, amax_slot=None, dtype=fc2.x_dtype)).payload.t()
        activated = Operand.tensorwise(scale_inv=kept.last_scale_inv, payload_t=activated_t)
        return fc2.grad_weight(g, activated, fc2_dtype, channels)

    return block.Inner(grad, first_sums=outputs.sums, last_sums=grad_y.sums, last_weight=grad_fc2, again=again)
