"""The weights of all experts for one product, each expert's matrix a separate low-precision parameter in one common payload.

An expert sees its own tokens only, and its weights, gradients and moments have their own magnitudes. So whatever has one scale per
tensor must have one per expert, and FP8-LM's Algorithm 1 (ZeRO) gains many whole tensors to distribute. Both follow from storing the
experts of [E, N, K] as E parameters [N, K]: optimizer, gradient synchronization, ZeRO, clipping, statistics and checkpoints treat them like
any other weight, and the optimizer updates them all in one launch.

The grouped GEMMs read one tensor [E, N, K]. The payloads of the parameters are slices of it, so no copy is needed. Code that replaces
payloads (`model.to`, a deep copy, `load_state_dict(assign=True)`) separates them; the next forward joins them again.

    model attribute             fc1_weight, an `ExpertMatrices`, in place of the Parameter [E, N, K]
    parameters                  fc1_weight.0, fc1_weight.1, ...
    plain state dict            fc1_weight [E, N, K], as before the conversion (`msamp.plain_state_dict`); the layer loads both
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from msamp.kernels import ops
from msamp.nn.differentiable_once import differentiable_once
from msamp.nn.experts import ExpertWeights
from msamp.nn.linear import Loading, scaling_parameter
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.recipe import Recipe
from msamp.numerics.tensor import OWN_ATTRIBUTES, ScalingTensor


class ExpertMatrices(Loading):
    """E low-precision parameters [N, K], named by the numbers of their experts, whose payloads are slices of one tensor [E, N, K].

    Args:
        weight: [E, N, K], any float dtype, finite; its attributes, gradient and `requires_grad` go to each parameter.
        recipe: `weight` is the storage format.
        scaling: the scales of this product's input and grad_output.
        name: of `weight` in the model, for messages.
        first: number of the first expert: 0, unless other ranks have experts before this rank's.

    Attributes:
        count: E.
        first: as given.
    """

    _payload: torch.Tensor | None = None
    _parts: tuple[torch.Tensor, ...] = ()
    _cast: tuple[int, ExpertWeights] | None = None  # the payload's version, and its operands
    _shares = False  # whether the forwards that are captured now belong to one step
    _step_cast: ExpertWeights | None = None

    def __init__(self, weight: nn.Parameter, recipe: Recipe, scaling: LinearScaling, name: str = "", first: int = 0) -> None:
        super().__init__()
        self.count, self.first = len(weight), first
        given = {key: value for key, value in vars(weight).items() if key not in OWN_ATTRIBUTES}
        for e, values in enumerate(weight.detach().unbind(), first):
            p = scaling_parameter(values, recipe, weight.requires_grad, f"{name}.{e}" if name else "")
            vars(p).update(given)  # such as _no_weight_decay, which optimizers read
            if weight.grad is not None:
                p.grad = weight.grad[e - first].clone()
            self.register_parameter(str(e), p)
        self.scaling = scaling
        self._join()

    @property
    def matrices(self) -> list[nn.Parameter]:
        """The parameters, by expert."""
        return [self._parameters[str(e)] for e in range(self.first, self.first + self.count)]  # type: ignore[misc]

    @property
    def shape(self) -> torch.Size:
        """[E, N, K]."""
        return torch.Size([self.count, *self.matrices[0].shape])

    @property
    def low_precision(self) -> bool:
        """Whether all matrices are stored in low precision; in a float copy of the model they are plain."""
        return all(isinstance(p, ScalingTensor) for p in self.matrices)

    def stacked(self) -> torch.Tensor:
        """Return the values as one plain tensor [E, N, K], through which gradients reach plain parameters."""
        return torch.stack([p.dequantize() if isinstance(p, ScalingTensor) else p for p in self.matrices])

    def forward(self) -> tuple[torch.Tensor, ExpertWeights]:
        """Return a stand-in [E, N, K] without values, whose gradient reaches every parameter, and the operands of the GEMMs.

        The operands are cast once per step: again when a payload's version shows that it was written. A CUDA graph would treat the version
        as a constant, so in a graph every forward casts, except in `one_cast_per_step`.
        """
        return _StandIn.apply(*self.matrices), self._operands()

    def _operands(self) -> ExpertWeights:
        payload = self._join()
        if payload.is_cuda and torch.cuda.is_current_stream_capturing():
            if not self._shares:
                return self._operands_of(payload)
            if self._step_cast is None:
                self._step_cast = self._operands_of(payload)
            return self._step_cast
        if payload.is_inference():  # which has no version counter
            return self._operands_of(payload)
        if self._cast is None or self._cast[0] != payload._version:
            self._cast = None  # frees the former operands first
            self._cast = payload._version, self._operands_of(payload)
        return self._cast[1]

    def drop_cast(self) -> None:
        """Free the operands that the last forward outside of graphs kept for the next one, which casts again. For code that replays graphs,
        which keep their own operands: as many bytes as the weights have elements, twice that if they are not stored in FP8."""
        self._cast = None

    def _operands_of(self, payload: torch.Tensor) -> ExpertWeights:
        """Cast the weights."""
        with torch.inference_mode(False), torch.no_grad():
            stored = torch.stack([p.scale_inv for p in self.matrices])  # type: ignore[attr-defined]
            dtype = self.scaling.gemm.weight.format.dtype
            rows, columns, scale_inv = ops.expert_cast(payload, stored, dtype)
            return ExpertWeights(payload if payload.dtype == dtype else rows, columns, scale_inv)

    @torch.no_grad()
    def _join(self) -> torch.Tensor:
        """Return the common payload [E, N, K], after making it again if a parameter has another payload."""
        matrices = self.matrices
        if self._payload is None or any(p.payload is not part for p, part in zip(matrices, self._parts, strict=True)):  # type: ignore[attr-defined]
            self._cast = None
            with torch.inference_mode(False):
                payloads = [p.payload for p in matrices]  # type: ignore[attr-defined]
                self._payload = payloads[0].new_empty(self.shape)
                self._parts = self._payload.unbind()
                for p, part, own in zip(matrices, self._parts, payloads, strict=True):
                    part.copy_(own)
                    p.payload = part  # type: ignore[attr-defined]
            self.watch_weights()
        return self._payload

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_payload": None, "_parts": (), "_cast": None, "_step_cast": None, "_shares": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.low_precision:
            self._join()

    def _apply(self, fn: Any, recurse: bool = True) -> "ExpertMatrices":
        super()._apply(fn, recurse)
        if self.low_precision:
            self._join()
        return self

    def extra_repr(self) -> str:
        count, outputs, inputs = self.shape
        gemm = self.scaling.gemm
        stored = self.matrices[0].format if self.low_precision else "plain"  # type: ignore[attr-defined]
        return (
            f"{count} matrices [{outputs}, {inputs}], weight {stored}, GEMM {gemm.input.format} x {gemm.weight.format}, "
            f"grad_output {gemm.grad_output.format}"
        )


@contextlib.contextmanager
def one_cast_per_step(matrices: Sequence[ExpertMatrices]) -> Iterator[None]:
    """Context of all micro-batches of a step, some or all of which are captured in CUDA graphs: the first captured forward of each weight
    casts it, and the graphs captured after it read that cast.

    Use it where the graphs are always replayed together, in the order of their captures, and nothing writes the weights between them. The
    casts of all weights are in the memory pool of the first graph until the context ends, so a single micro-batch is better without: its
    backward releases each weight's cast as soon as it is done with it.
    """
    try:
        for weight in matrices:
            weight._shares, weight._step_cast = True, None
        yield
    finally:
        for weight in matrices:
            weight._shares, weight._step_cast = False, None


class _StandIn(torch.autograd.Function):
    """View E parameters [N, K] as one tensor [E, N, K]; nothing is allocated, and its gradient is split back as views."""

    @staticmethod
    def forward(ctx: Any, *matrices: torch.Tensor) -> torch.Tensor:
        first = matrices[0]
        return torch.zeros((), dtype=first.dtype, device=first.device).expand(len(matrices), *first.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(part.detach() for part in grad.unbind())  # detached: in-place accumulation may write to each


def joined_weights(model: nn.Module) -> dict[str, list[str]]:
    """Return name of each weight [E, N, K] in a plain state dict -> names of its parameters in the model."""
    return {
        name: [f"{name}.{e}" if name else str(e) for e in range(module.first, module.first + module.count)]
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, ExpertMatrices)
    }
