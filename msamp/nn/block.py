"""Parts that layers share: norms, the casts at a block's two ends, the places where kernels leave scales, gradients of vectors, and outputs
that may be changed in place."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from msamp.kernels import ops
from msamp.nn.ends import Ends, Pending
from msamp.nn.gemm import LayerGemm, Operand
from msamp.nn.group_scaling import maxima_for
from msamp.nn.scaling_state import Slot, just_in_time_scale
from msamp.numerics.recipe import Cast


class Norm(NamedTuple):
    """How a block's norm computes: epsilon, and RMSNorm (no mean, no bias) instead of LayerNorm."""

    eps: float
    rms: bool


def unviewed(y: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`y` in another shape, as the output of an autograd function. A view would not do: autograd forbids every change in place of a view
    made in the function (`ReLU(inplace=True)`, `y += x`). Only for a `y` that nothing else holds."""
    return torch.ops.aten._unsafe_view.default(y, shape)


class NormWeights(NamedTuple):
    """A block's norm and its parameters.

    Attributes:
        norm: how it computes.
        weight, bias: [h], bias None without one.
    """

    norm: Norm
    weight: torch.Tensor
    bias: torch.Tensor | None

    def cast(self, x: torch.Tensor, residual: torch.Tensor | None, slot: Slot, cast: Cast, ends: Ends, scale_inv: torch.Tensor) -> "Normed":
        """`norm(x + residual)` of this rank's rows as the FP8 operand of the block's first GEMM.

        Args:
            x, residual: [M, h]; residual None adds nothing.
            slot: of the GEMM's input; its watch is told.
            cast: of the GEMM's input.
            ends: the ranks with rows that share the scale.
            scale_inv: FP32 0-dim holding 0, where the cast leaves its own.
        """

        def run(scale: torch.Tensor | None, amax: torch.Tensor | None, into: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
            eps, rms, dtype = *self.norm, cast.format.dtype
            return ops.normalize(x, residual, self.weight, self.bias, eps, scale, amax, dtype, rms=rms, scale_inv_slot=into)

        def amax() -> torch.Tensor:
            # Just in time over several ranks: the norm is computed once for its amax alone, as its kernel does on one.
            found = scale_inv.new_zeros(())
            run(scale_inv.new_ones(()), found, None)
            return found

        scale, amax_slot, shared = _scale(slot, cast, ends, amax)
        total, payload, _, mean, rstd = run(scale, amax_slot, scale_inv)
        if shared is not None:
            scale_inv.add_(shared, alpha=0)
        total = x if residual is None else total
        if slot.watch is not None:
            slot.watch(self.wide(total), payload, scale_inv)
        return Normed(total, payload, mean, rstd)

    def wide(self, total: torch.Tensor) -> torch.Tensor:
        """FP32: the values before the cast."""
        eps, rms = self.norm
        return ops.normalize(total, None, self.weight, self.bias, eps, None, None, torch.float32, rms=rms)[1]

    def start_again(self, total: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, ends: Ends) -> Pending:
        """The payload of all rows, cast again in backward from the stream [M, h] with the scale of forward: the same codes."""
        eps, rms = self.norm
        again = ops.normalize(total, None, self.weight, self.bias, eps, scale_inv.reciprocal(), None, dtype, rms=rms)[1]
        return ends.start_gather(again, "input all-gather again")


class Normed(NamedTuple):
    """The results of a block's norm.

    Attributes:
        total: [M, h], the stream that was normalised, as stored.
        payload: [M, h], FP8.
        mean, rstd: FP32 [M]; mean empty for RMSNorm.
    """

    total: torch.Tensor
    payload: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


def _scale(
    slot: Slot, cast: Cast, ends: Ends, amax: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Scale and amax slot for a kernel that casts rows, and the ranks' amax where their rows share a scale just in time (else None)."""
    if slot.scale is not None or not ends.spread:
        return slot.scale, slot.amax, None
    shared = ends.shared_amax(amax())
    if slot.amax is not None:
        slot.amax.copy_(torch.maximum(slot.amax, shared))
    return just_in_time_scale(cast, shared), None, shared


def start_grad_output(
    layer: LayerGemm, grad: torch.Tensor, scale_inv: torch.Tensor, ends: Ends, *, colsum: bool
) -> tuple[Callable[[], Operand], torch.Tensor]:
    """The gradient of a block's output, cast once for both GEMMs of the linear layer that gave it, by the maxima that its producer has
    left.

    Args:
        layer: the block's last linear layer.
        grad: [..., N], as autograd hands it over: this rank's rows.
        scale_inv: FP32 0-dim holding 0, where the cast leaves its own.
        ends: of the block.
        colsum: give the column sums of this rank's rows too, of which the bias's gradient is made.

    Returns:
        What waits for the operand of all rows in both layouts; FP32 [parts, N], empty without `colsum`.
    """
    rows, maxima = grad.reshape(-1, grad.shape[-1]), maxima_for(layer.grad, grad)
    scale, amax_slot, shared = _scale(layer.grad, layer.gemm.grad_output, ends, lambda: ops.amax(rows) if maxima is None else maxima.max())
    payload, payload_t, _, sums = ops.cast_transpose(
        rows,
        scale,
        amax_slot,
        layer.grad_dtype,
        row=True,
        col=not ends.spread,
        colsum=colsum,
        scale_inv_slot=scale_inv,
        maxima=maxima if shared is None else None,
    )
    if shared is not None:
        scale_inv.add_(shared, alpha=0)
    if layer.grad.watch is not None:
        layer.grad.watch(rows, payload, scale_inv)
    gathered = ends.start_gather(payload, "grad_output all-gather")

    def operand() -> Operand:
        codes = gathered()
        return Operand.tensorwise(codes, scale_inv, ops.transpose(codes) if ends.spread else payload_t)

    return operand, sums


def vector_gradients(*found: tuple[torch.Tensor, torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients of vectors (biases, norms), each in its vector's dtype, in one launch a dtype; None where there is no vector.

    Args:
        found: for each vector [N] the partial column sums (FP32 [parts, N]), and the vector.
    """
    gradients: list[torch.Tensor | None] = [None] * len(found)
    asked = [(i, parts, vector.dtype) for i, (parts, vector) in enumerate(found) if vector is not None]
    for dtype in {dtype for _, _, dtype in asked}:
        alike = [(i, parts) for i, parts, own in asked if own == dtype]
        for (i, _), gradient in zip(alike, ops.sum_parts([parts for _, parts in alike], dtype), strict=True):
            gradients[i] = gradient
    return gradients
