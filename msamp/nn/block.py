"""The two ends of a fused block, which attention and MLP share: the norm before, and the end of backward; and what other layers share too.

forward    `NormWeights.cast`      norm -> the FP8 operand of the block's first GEMM
backward   `start_grad_output`     the output's gradient -> the FP8 operand of the block's last GEMM
           `first_grad_output`     what an operator makes of the last GEMM's result -> the first layer's FP8 grad_output
           `finish_backward`       the first GEMM's FP8 grad_output -> gradients of that layer, the norm and the residual stream
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from msamp.kernels import ops, scalar_pool
from msamp.nn.cast_scales import CastScales, just_in_time_scale
from msamp.nn.ends import Ends, PendingRows, ReadyRows
from msamp.nn.gemm import LayerGemm, Operand
from msamp.nn.group_scaling import leave_maxima, maxima_for
from msamp.nn.saved_activations import Saved
from msamp.numerics.recipe import Cast


class Norm(NamedTuple):
    """How a block's norm computes: epsilon, and RMSNorm (no mean, no bias) instead of LayerNorm."""

    eps: float
    rms: bool


def unviewed(y: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`y` in another shape, as the output of an autograd function. A view would not do: autograd forbids every change in place of a view
    made in the function (`ReLU(inplace=True)`, `y += x`). Only for a `y` that nothing else holds."""
    return torch.ops.aten._unsafe_view.default(y, shape)


class BlockSettings(Protocol):
    """What attention's and MLP's settings have in common."""

    @property
    def norm(self) -> Norm: ...

    @property
    def first(self) -> LayerGemm: ...

    @property
    def last(self) -> LayerGemm: ...

    @property
    def saved(self) -> Saved: ...

    @property
    def ends(self) -> Ends: ...


class NormWeights(NamedTuple):
    """A block's norm and its parameters.

    Attributes:
        norm: how it computes.
        weight, bias: [h], bias None without one.
    """

    norm: Norm
    weight: torch.Tensor
    bias: torch.Tensor | None

    def cast(
        self, x: torch.Tensor, residual: torch.Tensor | None, slot: CastScales, cast: Cast, ends: Ends, scale_inv: torch.Tensor
    ) -> "Normalized":
        """`norm(x + residual)` of this rank's rows as the FP8 operand of the block's first GEMM.

        Args:
            x, residual: [M, h]; residual None adds nothing.
            slot: of the GEMM's input; its watch is told.
            cast: of the GEMM's input.
            ends: the ranks with rows that share the scale.
            scale_inv: FP32 0-dim holding 0, where the cast leaves its own.
        """

        def run(scale: torch.Tensor | None, amax_slot: torch.Tensor | None, scale_inv_slot: torch.Tensor | None) -> Normalized:
            return self.run(x, residual, scale=scale, amax_slot=amax_slot, dtype=cast.format.dtype, scale_inv_slot=scale_inv_slot)

        def amax() -> torch.Tensor:
            # Just in time over several ranks: the norm is computed once for its amax alone, as its kernel does on one.
            found = scale_inv.new_zeros(())
            run(scale_inv.new_ones(()), found, None)
            return found

        scale, amax_slot, shared = _scale(slot, cast, ends, amax)
        made = run(scale, amax_slot, scale_inv)
        if shared is not None:
            scale_inv.add_(shared, alpha=0)
        made = made if residual is not None else made._replace(total=x)
        if slot.watch is not None:
            slot.watch(self.wide(made.total), made.y, scale_inv)
        return made

    def run(self, x: torch.Tensor, residual: torch.Tensor | None = None, **options: Any) -> "Normalized":
        """`ops.normalize` of `x + residual`; `options` are its other arguments."""
        return Normalized(*ops.normalize(x, residual, weight=self.weight, bias=self.bias, eps=self.norm.eps, rms=self.norm.rms, **options))

    def wide(self, total: torch.Tensor) -> torch.Tensor:
        """FP32: the values before the cast."""
        return self.run(total, scale=None, amax_slot=None, dtype=torch.float32).y

    def start_again(self, total: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, ends: Ends) -> PendingRows:
        """The payload of all rows, cast again in backward from the stream [M, h] with the scale of forward: the same codes."""
        again = self.run(total, scale=scale_inv.reciprocal(), amax_slot=None, dtype=dtype).y
        return ends.start_gather(again, "input all-gather again")

    def transposed(self, total: torch.Tensor, kept: "KeptByBlock", dtype: torch.dtype) -> torch.Tensor:
        """The transpose of `cast`'s payload, made again in backward: the same codes."""
        return ops.normalize_transposed(
            total, kept.mean, kept.rstd, self.weight, self.bias, scale_inv=kept.input_scale_inv, dtype=dtype, rms=self.norm.rms
        )


class Normalized(NamedTuple):
    """The results of `ops.normalize`.

    Attributes:
        total: [M, h], the stream that was normalised, as stored.
        y: [M, h], FP8 or wide.
        scale_inv: FP32 0-dim; empty where it has a slot.
        mean, rstd: FP32 [M]; mean empty for RMSNorm.
    """

    total: torch.Tensor
    y: torch.Tensor
    scale_inv: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


class KeptByBlock(NamedTuple):
    """What a block keeps for backward beside its stream, in the order in which autograd saves it.

    Attributes:
        norm_weight, norm_bias: [h].
        mean, rstd: FP32 [M], see `Normalized`.
        input_scale_inv, last_scale_inv: FP32 0-dim, of the inputs of the first and of the last linear layer.
        gathered: FP8 [M of all ranks, h], the first layer's input, where the ends keep it.
        first_weight, last_weight: payloads as stored.
        first_bias, last_bias: [N] or None.
    """

    norm_weight: torch.Tensor
    norm_bias: torch.Tensor | None
    mean: torch.Tensor
    rstd: torch.Tensor
    input_scale_inv: torch.Tensor
    last_scale_inv: torch.Tensor
    gathered: torch.Tensor | None
    first_weight: torch.Tensor
    first_bias: torch.Tensor | None
    last_weight: torch.Tensor
    last_bias: torch.Tensor | None

    @classmethod
    def of(cls, saved: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], "KeptByBlock"]:
        """The parts of the stream (`Saved.keep`), which come first, and the others."""
        return saved[: -len(cls._fields)], cls(*saved[-len(cls._fields) :])


class Inner(NamedTuple):
    """What backward has come to between a block's last layer and its first.

    Attributes:
        grad: of the first layer's output, cast for both of its GEMMs.
        first_sums, last_sums: FP32 [parts, N], column sums of the grad_outputs of both layers, for the biases' gradients; empty without.
        last_weight: computes the gradient of the last layer's weight, where that can still wait; it is called once.
        again: the first layer's input of all ranks' rows; None casts it again, transposed, from the stream.
    """

    grad: Operand
    first_sums: torch.Tensor
    last_sums: torch.Tensor
    last_weight: Callable[[], torch.Tensor]
    again: PendingRows | None


class BlockGradients(NamedTuple):
    """The gradients of a block's arguments."""

    x: torch.Tensor
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None
    first_weight: torch.Tensor
    first_bias: torch.Tensor | None
    last_weight: torch.Tensor
    last_bias: torch.Tensor | None


class NormGradients(NamedTuple):
    """The results of `ops.normalize_backward`: of the input, FP32 [parts, h] sums for weight and bias, and maxima of `x`'s parts."""

    x: torch.Tensor
    weight_sums: torch.Tensor
    bias_sums: torch.Tensor
    maxima: torch.Tensor


class CastTransposed(NamedTuple):
    """The results of `ops.cast_transpose`, and of other operators that cast for two GEMMs."""

    payload: torch.Tensor
    payload_t: torch.Tensor
    scale_inv: torch.Tensor
    sums: torch.Tensor


class Activated(NamedTuple):
    """The results of `ops.activate`."""

    payload: torch.Tensor
    scale_inv: torch.Tensor


class ActivationGradient(NamedTuple):
    """The results of `ops.activate_backward`: the input's gradient in both layouts, its scale_inv, the activation's transpose in FP8, and
    column sums of the gradient."""

    payload: torch.Tensor
    payload_t: torch.Tensor
    scale_inv: torch.Tensor
    activated_t: torch.Tensor
    sums: torch.Tensor


_Cast = TypeVar("_Cast", CastTransposed, ActivationGradient)


def _scale(
    slot: CastScales, cast: Cast, ends: Ends, amax: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Scale and amax slot for a kernel that casts rows, and the ranks' amax where their rows share a scale just in time (else None)."""
    if slot.scale is not None or not ends.spread:
        return slot.scale, slot.amax, None
    shared = ends.shared_amax(amax())
    if slot.amax is not None:
        slot.amax.copy_(torch.maximum(slot.amax, shared))
    return just_in_time_scale(cast, shared), None, shared


class GradOutput(NamedTuple):
    """The gradient of a block's output on its way to both GEMMs of the last layer.

    Attributes:
        operand: waits for all rows, in both layouts.
        done: the row layout will not be read any more, see `PendingRows.done`.
        sums: FP32 [parts, N], column sums of this rank's rows; empty where they were not asked for.
    """

    operand: Callable[[], Operand]
    done: Callable[[], None]
    sums: torch.Tensor


def start_grad_output(layer: LayerGemm, grad: torch.Tensor, scale_inv: torch.Tensor, ends: Ends, *, colsum: bool) -> GradOutput:
    """The gradient of a block's output, cast once for both GEMMs of the linear layer that gave it, by the maxima that its producer has
    left.

    Args:
        layer: the block's last linear layer.
        grad: [..., N], as autograd hands it over: this rank's rows.
        scale_inv: FP32 0-dim holding 0, where the cast leaves its own.
        ends: of the block.
        colsum: give the column sums of this rank's rows too, of which the bias's gradient is made.
    """
    rows, maxima = grad.reshape(-1, grad.shape[-1]), maxima_for(layer.grad, grad)
    scale, amax_slot, shared = _scale(layer.grad, layer.gemm.grad_output, ends, lambda: ops.amax(rows) if maxima is None else maxima.max())
    layouts = {"row": True, "col": not ends.spread, "colsum": colsum}
    maxima = maxima if shared is None else None
    made = CastTransposed(
        *ops.cast_transpose(
            rows, scale=scale, amax_slot=amax_slot, dtype=layer.grad_dtype, scale_inv_slot=scale_inv, maxima=maxima, **layouts
        )
    )
    if shared is not None:
        scale_inv.add_(shared, alpha=0)
    if layer.grad.watch is not None:
        layer.grad.watch(rows, made.payload, scale_inv)
    gathered = ends.start_gather(made.payload, "grad_output all-gather")

    def operand() -> Operand:
        codes = gathered()
        codes_t = ops.transpose(codes) if ends.spread else made.payload_t
        return Operand.tensorwise(codes, scale_inv=scale_inv, payload_t=codes_t)

    return GradOutput(operand, gathered.done, made.sums)


def start_input_again(
    how: BlockSettings, stream: Sequence[torch.Tensor], kept: KeptByBlock, dtype: torch.dtype, *, asked: bool = False
) -> PendingRows | None:
    """The first layer's input of all ranks' rows for backward: as kept, or cast again from the stream and gathered. None where this rank
    has all rows, unless `asked`."""
    if kept.gathered is not None:
        return ReadyRows(kept.gathered)
    if not (asked or how.ends.spread):
        return None
    norm = NormWeights(how.norm, kept.norm_weight, kept.norm_bias)
    return norm.start_again(how.saved.restore(stream, dtype), kept.input_scale_inv, how.first.x_dtype, how.ends)


def first_grad_output(layer: LayerGemm, run: Callable[..., _Cast], *, colsum: bool, device: torch.device) -> tuple[Operand, _Cast]:
    """The grad_output of a block's first linear layer, computed and cast for both of its GEMMs by one operator.

    Args:
        layer: the block's first linear layer.
        run: the operator, called with its dtype, scale, amax_slot and flags.
        colsum: give column sums too, of which the bias's gradient is made.
        device: of the gradient.

    Returns:
        The operand in both layouts, and all that the operator gave.
    """
    slot, scale_inv = layer.grad, scalar_pool.take(device)
    made = run(dtype=layer.grad_dtype, scale=slot.scale, amax_slot=slot.amax, colsum=colsum, scale_inv_slot=scale_inv)
    if slot.watch is not None:
        slot.watch(run(dtype=torch.float32, scale=None, amax_slot=None).payload, made.payload, scale_inv)
    return Operand.tensorwise(made.payload, scale_inv=scale_inv, payload_t=made.payload_t), made


def finish_backward(
    how: BlockSettings,
    stream: Sequence[torch.Tensor],
    kept: KeptByBlock,
    inner: Inner,
    *,
    residual: torch.Tensor,
    weight_dtypes: tuple[torch.dtype, torch.dtype],
) -> BlockGradients:
    """The end of a block's backward: its first linear layer, its norm and the residual stream.

    Args:
        how: of the block.
        stream: the parts of the norm's input, as `how.saved` keeps it.
        kept: the other tensors kept.
        inner: what backward has come to. Only this call may hold it: its memory is freed before the norm's gradients need some.
        residual: [..., h], the gradient along the residual path, which the norm's kernel adds.
        weight_dtypes: of the gradients of the first and the last weight.
    """
    first, dtype = how.first, residual.dtype
    grad, first_sums, last_sums, last_weight, again = inner
    del inner
    norm = NormWeights(how.norm, kept.norm_weight, kept.norm_bias)
    partial = first.grad_input(grad, first.weight(kept.first_weight, transpose=True), dtype)
    grad_n = how.ends.start_sum_grad(partial, first)  # on its way while the weights' gradients are computed
    del partial
    grad = grad._replace(payload=None)
    grad_last = last_weight()
    del last_weight
    total = how.saved.restore(stream, dtype)
    if again is None:
        n8_t = norm.transposed(total, kept, first.x_dtype)
    else:
        n8_t = ops.transpose(again())
        again.done()
    grad_first = first.grad_weight(grad, Operand.tensorwise(scale_inv=kept.input_scale_inv, payload_t=n8_t), weight_dtypes[0])
    del grad, n8_t, again
    rows = residual.reshape(-1, residual.shape[-1])
    made = NormGradients(
        *ops.normalize_backward(
            grad_n(), total, kept.mean, kept.rstd, kept.norm_weight, rows, rms=how.norm.rms, maxima=how.last.grad_just_in_time
        )
    )
    norm_weight, norm_bias, first_bias, last_bias = vector_gradients(
        (made.weight_sums, kept.norm_weight), (made.bias_sums, kept.norm_bias), (first_sums, kept.first_bias), (last_sums, kept.last_bias)
    )
    x = leave_maxima(made.x.view(residual.shape), made.maxima)
    return BlockGradients(x, norm_weight, norm_bias, grad_first, first_bias, grad_last, last_bias)


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
