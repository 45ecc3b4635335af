"""SGD with momentum [Sutskever et al. 2013], and Muon, which orthogonalizes a matrix's momentum [Jordan et al. 2024].

Both have at most one state, the momentum, and compute in FP32 with torch operations in torch.optim's order, so that FP32 states are equal
bit for bit. Hyperparameters are Python floats, or on a GPU FP64 0-dim tensors, so that the host never waits.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from msamp.kernels.reference.adamw import GRAD
from msamp.kernels.reference.store import load, store_
from msamp.kernels.tables import Tables
from msamp.numerics.stochastic_rounding import Thresholds
from msamp.numerics.tensor import fp32_values
from msamp.optim.states import local, payload, scale_inv
from msamp.optim.updates.update import State, StepInputs, Update, UpdateBatch, check_range

MOMENTUM = State("momentum_buffer", "m", "m")  # the key is torch's
Number = float | torch.Tensor
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial, steep at 0 for small singular values [Jordan et al. 2024]


class Tensors(NamedTuple):
    """One parameter in an update.

    Attributes:
        p, g: FP32, master and gradient, of one shape; `g` is only read.
        buffer: the momentum, FP32; None for an update without a state.
        first: bool 0-dim, whether this is the parameter's first step.
    """

    p: torch.Tensor
    g: torch.Tensor
    buffer: torch.Tensor | None
    first: torch.Tensor


def _original(rows: int, columns: int) -> float:
    """Set the spectral norm of a step from the matrix's shape [Jordan et al. 2024]."""
    return math.sqrt(max(1.0, rows / columns))


# Factor of Muon's learning rate by `adjust_lr_fn`, with the names of torch.optim.Muon. The last gives a step the root mean square 0.2 of
# AdamW's steps, for any shape [Liu et al. 2025, equation 4].
ADJUSTMENTS: dict[str | None, Callable[[int, int], float]] = {
    None: _original,
    "original": _original,
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def orthogonal(x: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    """Return U S' V^T for x = U S V^T, BF16 [rows, columns], with singular values S' between about 0.7 and 1.2. It takes Newton-Schulz
    steps a X + (b A + c A^2) X, A = X X^T, starting at x divided by its Frobenius norm, or by `eps` if that is larger."""
    a, b, c = coefficients
    wide = x.shape[0] <= x.shape[1]
    y = (x if wide else x.T).bfloat16()
    y = y / y.norm().clamp(min=eps)
    for _ in range(steps):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y if wide else y.T


def add_(x: torch.Tensor, y: torch.Tensor, factor: Number) -> torch.Tensor:
    """Add factor * y to x in place."""
    return x.addcmul_(y.to(x.dtype), factor.to(x.dtype)) if isinstance(factor, torch.Tensor) else x.add_(y, alpha=factor)


def _weight(x: Number) -> Number:
    """Return `x` in the type that lerp requires with FP32 tensors."""
    return x.float() if isinstance(x, torch.Tensor) else x


class _Momentum(Update):
    """The common base of SGD and Muon: at most one state, and torch operations one tensor at a time. On a GPU the host never waits; a step
    that is not usable is computed and then undone."""

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        self.check_numbers(group)  # schedulers may change the momentum
        return [float(group["lr"]), group["weight_decay"], group["momentum"], group.get("dampening", 0.0)]

    def run(self, tables: Tables, batch: UpdateBatch, inputs: StepInputs) -> None:
        amaxes, kept, coefficient, usable = inputs
        if not usable.is_cuda and not usable:
            return
        numbers: list[Number] = list(batch.hyper.unbind()) if batch.hyper.is_cuda else batch.hyper.tolist()
        # By tables: a CUDA graph's capture refuses the copy of a list of indices from the host.
        batch_amaxes = amaxes.index_select(1, tables.send(("indices", *batch.indices), batch.indices))
        g_amax = batch_amaxes[GRAD] if coefficient is None else batch_amaxes[GRAD] * coefficient
        if batch.group["weight_decay"] and not batch.group["decoupled"]:  # the decay is part of the gradient
            g_amax = g_amax + numbers[1] * batch_amaxes[self.master_row]
        bounds = self.bounds(numbers, batch_amaxes, g_amax, torch.stack(batch.steps) == 0) if self.kept else g_amax
        for i, g in enumerate(batch.grads):
            values = fp32_values(g) if coefficient is None else fp32_values(g) * coefficient
            stored = [x[i : i + 1] for x in (batch.states.get(MOMENTUM.key, []), batch.masters, batch.weights) if x]
            before = [x.clone() for x in _memory(stored)] if usable.is_cuda else []
            self._update(batch, i, values, numbers, (bounds[i : i + 1], 2.0 * batch_amaxes[self.master_row, i : i + 1]))
            for x, old in zip(_memory(stored), before, strict=False):
                x.copy_(torch.where(usable, x, old))
        torch._foreach_add_(batch.steps, [usable.float()] * len(batch.steps))  # of one tensor the host would read the value
        places = tables.send(("places", *batch.places), batch.places)
        kept[: self.master_row].index_copy_(1, places, self.stored_amaxes(batch))

    def _update(
        self, batch: UpdateBatch, i: int, g: torch.Tensor, numbers: Sequence[Number], bounds: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Load, update and store one parameter."""
        buffers, masters = (x[i : i + 1] for x in (batch.states.get(MOMENTUM.key, []), batch.masters))
        (p,), buffer = load(masters), load(buffers)
        # Elements whose momentum gets no gradient or decay: its stored value must decrease.
        decays = batch.group["weight_decay"] and not batch.group["decoupled"]
        no_gradient = [(g == 0) & (p == 0) if decays else g == 0] if buffer else None
        self.change_(Tensors(p, g, buffer[0] if buffer else None, batch.steps[i] == 0), numbers, batch.group)
        step = batch.steps[i] + 1 if batch.steps[i].is_cuda else int(batch.steps[i]) + 1
        drawn = [Thresholds(batch.keys[i], batch.offsets[i], step)]
        if buffer:
            store_(buffers, buffer, bounds[0], drawn if batch.rounding.m else None, "m", no_gradient=no_gradient)
        store_(masters, [p], bounds[1], drawn if batch.rounding.masters else None, "master")
        if batch.weights:
            store_(batch.weights[i : i + 1], load(masters), bounds[1])

    @abstractmethod
    def bounds(self, numbers: Sequence[Number], amaxes: torch.Tensor, g_amax: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Return upper bounds for the new momenta, FP32 [n].

        Args:
            numbers: the group's hyperparameters.
            amaxes: the table's columns of these parameters.
            g_amax: amaxes of the gradients after clipping and weight decay.
            first: bool [n], whether this is the parameter's first step.
        """

    @abstractmethod
    def change_(self, tensors: Tensors, numbers: Sequence[Number], group: Mapping[str, Any]) -> None:
        """Update master and momentum in FP32, in place."""


class SGD(_Momentum):
    """torch.optim.SGD: `sgd` without a state, `sgd-momentum` with one. Weight decay is added to the gradient, or applied to the weight with
    `decoupled`."""

    def options(self) -> dict[str, Any]:
        return {"momentum": 0.9 if self.kept else 0.0, "dampening": 0.0, "nesterov": False}

    def check_numbers(self, group: Mapping[str, Any]) -> None:
        super().check_numbers(group)
        momentum, dampening = group["momentum"], group["dampening"]
        check_range("momentum", momentum, 0.0, math.inf)
        check_range("dampening", dampening, -math.inf, math.inf)
        if momentum and not self.kept:
            raise ValueError(f"momentum is {momentum}, but update 'sgd' has no momentum state; set it to 0, or use update 'sgd-momentum'")
        if group["nesterov"] and (dampening or not momentum):
            raise ValueError(
                f"nesterov is True with momentum {momentum} and dampening {dampening}; it requires a momentum above 0 and dampening 0"
            )

    def bounds(self, numbers: Sequence[Number], amaxes: torch.Tensor, g_amax: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        _, _, momentum, dampening = numbers
        share = torch.as_tensor(1 - dampening, device=first.device).abs()
        return momentum * amaxes[1] + torch.where(first, torch.ones_like(share), share).float() * g_amax

    def change_(self, tensors: Tensors, numbers: Sequence[Number], group: Mapping[str, Any]) -> None:
        """buffer = momentum buffer + (1 - dampening) g, p = p - lr buffer; the first step is not dampened. Without a buffer the step is g,
        with `nesterov` it is g + momentum buffer."""
        (p, g, buffer, first), (lr, weight_decay, momentum, dampening) = tensors, numbers
        if group["weight_decay"] and group["decoupled"]:
            p.mul_(1 - lr * weight_decay)
        elif group["weight_decay"]:
            g = add_(g.clone(), p, weight_decay)
        step = g
        if buffer is not None:
            kept = torch.where(first, 0.0, buffer * momentum) if group["dampening"] else buffer.mul_(momentum)
            kept = add_(kept, g, 1 - dampening)
            buffer.copy_(torch.where(first, g, kept) if group["dampening"] else kept)
            step = add_(g.clone(), buffer, momentum) if group["nesterov"] else buffer
        add_(p, step, -lr)


class Muon(_Momentum):
    """torch.optim.Muon: the momentum of whole matrices, orthogonalized in BF16 [Jordan et al. 2024]. `adjust_lr_fn="match_rms_adamw"`
    scales as in [Liu et al. 2025, section 2.2]. Vectors, embeddings and the LM head require AdamW, in a separate group."""

    decoupled_only = True

    def options(self) -> dict[str, Any]:
        return {
            "momentum": 0.95,
            "nesterov": True,
            "ns_coefficients": COEFFICIENTS,
            "eps": 1e-7,
            "ns_steps": 5,
            "adjust_lr_fn": None,
        }

    def check_parameter(self, p: torch.Tensor) -> None:
        """Require a whole matrix."""
        if p.dim() != 2:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is not a matrix, which update 'muon' requires; put it in a parameter group with "
                "update fp32 (AdamW)"
            )
        if local(p) is not p or getattr(p, "tensor_model_parallel", False):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is sharded (tensor parallelism or fully_shard), but update 'muon' orthogonalizes "
                "whole matrices; use AdamW or SGD, or shard only the optimizer (zero=True)"
            )

    def check_numbers(self, group: Mapping[str, Any]) -> None:
        super().check_numbers(group)
        check_range("momentum", group["momentum"], 0.0, 1.0)
        if not 0 <= group["ns_steps"] < 100:
            raise ValueError(f"ns_steps is {group['ns_steps']}; it must be in [0, 100)")
        if len(group["ns_coefficients"]) != 3:
            raise ValueError(f"ns_coefficients are {group['ns_coefficients']}; there must be three")
        if group["adjust_lr_fn"] not in ADJUSTMENTS:
            legal = ", ".join(map(repr, ADJUSTMENTS))
            raise ValueError(f"adjust_lr_fn is {group['adjust_lr_fn']!r}; choose one of {legal}")

    def bounds(self, numbers: Sequence[Number], amaxes: torch.Tensor, g_amax: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        momentum = numbers[2]
        return momentum * amaxes[1] + (1 - momentum) * g_amax

    def change_(self, tensors: Tensors, numbers: Sequence[Number], group: Mapping[str, Any]) -> None:
        """buffer = momentum buffer + (1 - momentum) g, p = (1 - lr weight_decay) p - lr' orthogonal(buffer); with `nesterov` the
        orthogonalized matrix is momentum buffer + (1 - momentum) g."""
        (p, g, buffer, _), (lr, weight_decay, momentum, _) = tensors, numbers
        assert buffer is not None
        buffer.lerp_(g, _weight(1 - momentum))
        wanted = g.lerp(buffer, _weight(momentum)) if group["nesterov"] else buffer
        step = orthogonal(wanted, group["ns_coefficients"], group["ns_steps"], group["eps"])
        if group["weight_decay"]:
            p.mul_(1 - lr * weight_decay)
        add_(p, step, -(lr * ADJUSTMENTS[group["adjust_lr_fn"]](*p.shape)))


def _memory(stored: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return payloads (FP8 as bytes) and scales, without copies."""
    memory = []
    for x in (x for xs in stored for x in xs):
        own, scale = payload(x), scale_inv(x)
        memory += [own.view(torch.uint8) if own.element_size() == 1 else own, *([] if scale is None else [scale])]
    return memory
