"""The steps that the fused attention and MLP blocks share, and the result types of the operators that other layers use too.

forward    `NormWeights.cast`      norm -> FP8 operand of the block's first GEMM
backward   `start_grad_output`     gradient of the block's output -> FP8 operand of its last GEMM
           `first_grad_output`     result of the last GEMM's grad_input, through one operator -> the first layer's FP8 grad_output
           `finish_backward`       the first layer's FP8 grad_output -> gradients of that layer, the norm and the residual stream
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from msamp.kernels import ops, scalar_pool
from msamp.nn.cast_scales import CastScales, just_in_time_scale
from msamp.nn.ends import Ends, PendingRows, ReadyRows
from msamp.nn.gemm import LayerGemm, Operand
from msamp.nn.group_scaling import leave_maxima, maxima_for
from msamp.nn.saved_activations import Saved
from msamp.numerics.recipe import Cast


class Wait:
    """A module's hook that waits for its weights. A block that uses a module's weights without calling it passes over this hook, since the
    block's own has waited for all of them (`weight_holders`). A copy or pickle waits for the original's weights and then for nothing; it
    reads a module's own parameters before its hooks, so before a bare layer is copied, wait by `optimizer.wait()`."""

    def __init__(self, wait: Callable[..., Any] | None = None) -> None:
        self.wait = wait

    def __call__(self, *_: Any) -> None:
        if self.wait is not None:
            self.wait()

    def __reduce__(self) -> Any:
        self()
        return Wait, ()


def wait_for_weights(module: nn.Module) -> None:
    """Wait as the module's hooks do, which a call of `module.forward` passes over (`torch.utils.checkpoint` of a bound method)."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, Wait):
            hook()


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that do not run if a block uses a module's weights without calling it, except those that wait for weights."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [hook for kind in kinds for hook in kind.values() if not isinstance(hook, Wait)]


class Norm(NamedTuple):
    """The settings of a block's norm: epsilon, and whether it is RMSNorm (no mean, no bias) instead of LayerNorm."""

    eps: float
    rms: bool


def unviewed(y: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Reshape `y`, the output of an autograd function, without making it a view: autograd forbids in-place changes of a view that was
    created in the function (`ReLU(inplace=True)`, `y += x`). Nothing else may hold `y`."""
    return torch.ops.aten._unsafe_view.default(y, shape)


class BlockSettings(Protocol):
    """The settings that the attention and MLP blocks share."""

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
        norm: its settings.
        weight, bias: [h]; bias may be None.
    """

    norm: Norm
    weight: torch.Tensor
    bias: torch.Tensor | None

    def cast(
        self, x: torch.Tensor, residual: torch.Tensor | None, slot: CastScales, cast: Cast, ends: Ends, scale_inv: torch.Tensor
    ) -> "Normalized":
        """Compute `norm(x + residual)` of this rank's rows as the FP8 operand of the block's first GEMM.

        Args:
            x, residual: [M, h]; residual None adds nothing.
            slot: of the GEMM's input; its watch is called.
            cast: of the GEMM's input.
            ends: gives access to the ranks whose rows share the scale.
            scale_inv: FP32 0-dim containing 0; the cast writes its scale_inv here.
        """

        def run(scale: torch.Tensor | None, amax_slot: torch.Tensor | None, scale_inv_slot: torch.Tensor | None) -> Normalized:
            return self.run(x, residual, scale=scale, amax_slot=amax_slot, dtype=cast.format.dtype, scale_inv_slot=scale_inv_slot)

        def amax() -> torch.Tensor:
            # For a just-in-time scale over several ranks, compute the norm once only to measure its amax, as the kernel does on one rank.
            amax_slot = scale_inv.new_zeros(())
            run(scale_inv.new_ones(()), amax_slot, None)
            return amax_slot

        scale, amax_slot, shared = _scale(slot, cast, ends, amax)
        normed = run(scale, amax_slot, scale_inv)
        if shared is not None:
            scale_inv.add_(shared, alpha=0)
        normed = normed if residual is not None else normed._replace(total=x)
        if slot.watch is not None:
            slot.watch(self.wide(normed.total), normed.y, scale_inv)
        return normed

    def run(self, x: torch.Tensor, residual: torch.Tensor | None = None, **options: Any) -> "Normalized":
        """Call `ops.normalize` on `x + residual`; `options` are its other arguments."""
        return Normalized(*ops.normalize(x, residual, weight=self.weight, bias=self.bias, eps=self.norm.eps, rms=self.norm.rms, **options))

    def wide(self, total: torch.Tensor) -> torch.Tensor:
        """Return the values before the cast, in FP32."""
        return self.run(total, scale=None, amax_slot=None, dtype=torch.float32).y

    def transposed(self, total: torch.Tensor, kept: "KeptByBlock", dtype: torch.dtype) -> torch.Tensor:
        """In backward: return the transpose of `cast`'s payload, with the same codes."""
        if dtype.itemsize > 1:
            return self.run(total, scale=None, amax_slot=None, dtype=dtype).y.t()
        return ops.normalize_transposed(
            total, kept.mean, kept.rstd, self.weight, self.bias, scale_inv=kept.input_scale_inv, dtype=dtype, rms=self.norm.rms
        )


class Normalized(NamedTuple):
    """The results of `ops.normalize`.

    Attributes:
        total: [M, h], the input of the norm, in the stream's dtype.
        y: [M, h], FP8 or wide.
        scale_inv: FP32 0-dim; empty if a slot was given.
        mean, rstd: FP32 [M]; mean is empty for RMSNorm.
    """

    total: torch.Tensor
    y: torch.Tensor
    scale_inv: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


class KeptByBlock(NamedTuple):
    """The tensors that a block saves for backward besides its stream, in the order in which autograd saves them.

    Attributes:
        norm_weight, norm_bias: [h].
        mean, rstd: FP32 [M], see `Normalized`.
        input_scale_inv, last_scale_inv: FP32 0-dim, of the inputs of the first and of the last linear layer.
        gathered: FP8 [M of all ranks, h], the first layer's input, if `Ends.keeps_gathered`.
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
        """Split autograd's saved tensors into the parts of the stream (`Saved.keep`), which come first, and the others."""
        return saved[: -len(cls._fields)], cls(*saved[-len(cls._fields) :])


class Inner(NamedTuple):
    """The intermediate result of a block's backward, after its last layer and before its first.

    Attributes:
        grad: of the first layer's output, cast for both of its GEMMs.
        first_sums, last_sums: FP32 [parts, N], column sums of both layers' grad_outputs, for the bias gradients; empty without a bias.
        last_weight: returns the gradient of the last layer's weight, which may be computed lazily; called once. None if not requested.
        again: the first layer's input for the rows of all ranks; None casts it again, transposed, from the stream.
    """

    grad: Operand
    first_sums: torch.Tensor
    last_sums: torch.Tensor
    last_weight: Callable[[], torch.Tensor | None]
    again: PendingRows | None


class BlockGradients(NamedTuple):
    """The gradients of a block's arguments."""

    x: torch.Tensor
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None
    first_weight: torch.Tensor | None
    first_bias: torch.Tensor | None
    last_weight: torch.Tensor | None
    last_bias: torch.Tensor | None


class NormGradients(NamedTuple):
    """The results of `ops.normalize_backward`: gradient of the input, FP32 [parts, h] sums for weight and bias, partial maxima of `x`."""

    x: torch.Tensor
    weight_sums: torch.Tensor
    bias_sums: torch.Tensor
    maxima: torch.Tensor


class CastTransposed(NamedTuple):
    """The results of `ops.cast_transpose` and of other operators that cast for two GEMMs."""

    payload: torch.Tensor
    payload_t: torch.Tensor
    scale_inv: torch.Tensor
    sums: torch.Tensor


class Activated(NamedTuple):
    """The results of `ops.activate`."""

    payload: torch.Tensor
    scale_inv: torch.Tensor


class ActivationGradient(NamedTuple):
    """The results of `ops.activate_backward`: the input's gradient in both layouts, its scale_inv, the transposed activation in FP8, and
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
    """Return scale and amax slot for a kernel that casts rows, and the amax over ranks if they share a just-in-time scale (else None)."""
    if slot.scale is not None or not ends.spread:
        return slot.scale, slot.amax, None
    shared = ends.shared_amax(amax())
    if slot.amax is not None:
        slot.amax.copy_(torch.maximum(slot.amax, shared))
    return just_in_time_scale(cast, shared), None, shared


class GradOutput(NamedTuple):
    """The cast gradient of a block's output, for both GEMMs of the last layer.

    Attributes:
        rows: of all ranks, for grad_input.
        transposed: waits for all rows, releases them (`PendingRows.done`), and returns their transpose, for grad_weight. Called once, after
            the last read of `rows`.
        scale_inv: FP32 0-dim.
        sums: FP32 [parts, N], column sums of this rank's rows; empty if not requested.
    """

    rows: PendingRows
    transposed: Callable[[], Operand]
    scale_inv: torch.Tensor
    sums: torch.Tensor


def start_grad_output(layer: LayerGemm, grad: torch.Tensor, scale_inv: torch.Tensor, ends: Ends, *, colsum: bool) -> GradOutput:
    """Cast the gradient of a block's output once for both GEMMs of its last linear layer, using the maxima that its producer attached.

    Args:
        layer: the block's last linear layer.
        grad: [..., N] from autograd: this rank's rows.
        scale_inv: FP32 0-dim containing 0; the cast writes its scale_inv here.
        ends: of the block.
        colsum: also return the column sums of this rank's rows, for the bias gradient.
    """
    rows, maxima = grad.reshape(-1, grad.shape[-1]), maxima_for(layer.grad, grad)
    scale, amax_slot, shared = _scale(layer.grad, layer.gemm.grad_output, ends, lambda: ops.amax(rows) if maxima is None else maxima.max())
    layouts = {"row": True, "col": not ends.spread, "colsum": colsum}
    maxima = maxima if shared is None else None
    if layer.in_bf16:
        wide = rows.to(layer.grad_dtype)
        cast = CastTransposed(wide, wide.t(), scale_inv, rows.sum(0, keepdim=True, dtype=torch.float32) if colsum else scale_inv)
    else:
        cast = CastTransposed(
            *ops.cast_transpose(
                rows, scale=scale, amax_slot=amax_slot, dtype=layer.grad_dtype, scale_inv_slot=scale_inv, maxima=maxima, **layouts
            )
        )
    if shared is not None:
        scale_inv.add_(shared, alpha=0)
    if layer.grad.watch is not None:
        layer.grad.watch(rows, cast.payload, scale_inv)
    gathered = ends.start_gather(cast.payload, "grad_output all-gather")

    def transposed() -> Operand:
        codes_t = ops.transpose(gathered()) if ends.spread else cast.payload_t
        gathered.done()
        return Operand.tensorwise(scale_inv=scale_inv, payload_t=codes_t)

    return GradOutput(gathered, transposed, scale_inv, cast.sums)


def start_input_again(
    settings: BlockSettings, stream: Sequence[torch.Tensor], kept: KeptByBlock, dtype: torch.dtype, *, asked: bool = False
) -> PendingRows | None:
    """Return the first layer's input for the rows of all ranks, in backward: as saved, or cast again from the stream and gathered. None if
    this rank has all rows, unless `asked`."""
    if kept.gathered is not None:
        return ReadyRows(kept.gathered)
    if not (asked or settings.ends.spread):
        return None
    norm, total = NormWeights(settings.norm, kept.norm_weight, kept.norm_bias), settings.saved.restore(stream, dtype)
    # The scale of forward gives the same codes.
    again = norm.run(total, scale=kept.input_scale_inv.reciprocal(), amax_slot=None, dtype=settings.first.x_dtype).y
    return settings.ends.start_gather(again, "input all-gather again")


def first_grad_output(layer: LayerGemm, run: Callable[..., _Cast], *, colsum: bool, device: torch.device) -> tuple[Operand, _Cast]:
    """Compute the grad_output of a block's first linear layer and cast it for both of its GEMMs, with one operator.

    Args:
        layer: the block's first linear layer.
        run: the operator, called with its dtype, scale, amax_slot and flags.
        colsum: also return column sums, for the bias gradient.
        device: of the gradient.

    Returns:
        The operand in both layouts, and all results of the operator.
    """
    slot, scale_inv = layer.grad, scalar_pool.take(device)
    outputs = run(dtype=layer.grad_dtype, scale=slot.scale, amax_slot=slot.amax, colsum=colsum, scale_inv_slot=scale_inv)
    if slot.watch is not None:
        slot.watch(run(dtype=torch.float32, scale=None, amax_slot=None).payload, outputs.payload, scale_inv)
    transposed = outputs.payload.t() if layer.in_bf16 else outputs.payload_t
    return Operand.tensorwise(outputs.payload, scale_inv=scale_inv, payload_t=transposed), outputs


def finish_backward(
    settings: BlockSettings,
    stream: Sequence[torch.Tensor],
    kept: KeptByBlock,
    inner: Inner,
    *,
    residual: torch.Tensor,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    more: Sequence[torch.Tensor] = (),
) -> BlockGradients:
    """Run the end of a block's backward: its first linear layer, its norm and the residual stream.

    Args:
        settings: of the block.
        stream: the saved parts of the norm's input (`settings.saved`).
        kept: the other saved tensors.
        inner: the intermediate result. The caller must not hold it: its memory is freed before the norm's gradients are allocated.
        residual: [..., h], the gradient of the residual path, which the norm's kernel adds.
        dtype: of the results of GEMMs; the stream may be wider, under autocast.
        weight_dtype: of the gradient of the first weight; None does not compute it.
        more: payloads of the weights that follow below the first one (`LayerGemm.more`).
    """
    first = settings.first
    grad, first_sums, last_sums, last_weight, again = inner
    del inner
    norm = NormWeights(settings.norm, kept.norm_weight, kept.norm_bias)
    partial = first.grad_input(grad, first.weight(kept.first_weight, *more, transpose=True), dtype)
    grad_n = settings.ends.start_sum_grad(partial, first)  # the collective overlaps with the weight gradients
    del partial
    grad = grad._replace(payload=None)
    grad_last = last_weight()
    del last_weight
    total = settings.saved.restore(stream, residual.dtype)
    grad_first = None
    if weight_dtype is not None:
        n8_t = norm.transposed(total, kept, first.x_dtype) if again is None else ops.transpose(again())
        grad_first = first.grad_weight(grad, Operand.tensorwise(scale_inv=kept.input_scale_inv, payload_t=n8_t), weight_dtype)
        del n8_t
    if again is not None:
        again.done()
    del grad, again
    rows = residual.reshape(-1, residual.shape[-1])
    gradients = NormGradients(
        *ops.normalize_backward(
            grad_n(), total, kept.mean, kept.rstd, kept.norm_weight, rows, rms=settings.norm.rms, maxima=settings.last.grad_just_in_time
        )
    )
    norm_weight, norm_bias, first_bias, last_bias = vector_gradients(
        (gradients.weight_sums, kept.norm_weight),
        (gradients.bias_sums, kept.norm_bias),
        (first_sums, kept.first_bias),
        (last_sums, kept.last_bias),
    )
    x = leave_maxima(gradients.x.view(residual.shape), gradients.maxima)
    return BlockGradients(x, norm_weight, norm_bias, grad_first, first_bias, grad_last, last_bias)


def rows_of_each(gradient: torch.Tensor | None, weights: Sequence[int]) -> list[torch.Tensor | None]:
    """Divide the gradient [sum of rows, K] of joined weights, by their numbers of rows, into views with their own version counters."""
    if gradient is None or len(weights) == 1:
        return [gradient, *[None] * (len(weights) - 1)]
    return [part.data for part in gradient.split(list(weights))]


def vector_gradients(*pairs: tuple[torch.Tensor, torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return the gradients of vectors (biases, norms), each in its vector's dtype, with one launch per dtype; None for a missing vector.

    Args:
        pairs: for each vector [N], the partial column sums (FP32 [parts, N]) and the vector.
    """
    gradients: list[torch.Tensor | None] = [None] * len(pairs)
    asked = [(i, parts, vector.dtype) for i, (parts, vector) in enumerate(pairs) if vector is not None]
    for dtype in {dtype for _, _, dtype in asked}:
        alike = [(i, parts) for i, parts, own in asked if own == dtype]
        for (i, _), gradient in zip(alike, ops.sum_parts([parts for _, parts in alike], dtype), strict=True):
            gradients[i] = gradient
    return gradients
