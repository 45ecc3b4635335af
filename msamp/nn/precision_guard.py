"""Raise linear layers whose FP8 casts lose too much to BF16, and return them when their casts are good again.

Why. A run in FP8 can go wrong after many tokens: a channel grows until one scale per tensor leaves nothing for the others, or values jump
beyond a delayed scale. The precision record shows it, but somebody has to look. A guard looks itself, at a few steps, and acts on the
layers concerned.

What. At every N-th step each layer's casts are measured, all elements, micro-batches and ranks together:

    saturation    share of the elements at the format's largest value             more than its bound is bad
    underflow     share of the non-zero elements that became zero                 more than its bound is bad
    SQNR, dB      power of the values over power of the rounding error            less than its bound is bad
    shrinkage     share of a sum of products that the tensor cores lost           more than its bound is bad

The first three are of the input, the grad_output, and the weight if its GEMMs cast it (O1 and O2; at O3 the weight is stored in E4M3 and is
not cast). Shrinkage is of some elements of the three products, compared with their exact sums (`msamp.numerics.accumulation`). A layer that
is bad in K such checks in a row is raised: it computes in BF16 (`msamp.nn.raised_linear`). While it is raised its casts are measured
all the same, and after M good checks in a row it returns. A layer whose sums shrank does not return, since BF16 has no such sums to
measure; accumulate its products in full (`Gemms.with_fast`).

    FP8     --  K bad checks in a row   -->  BF16
    BF16    --  M good checks in a row  -->  FP8

One verdict. Ranks add their sums in one all-reduce of 27 numbers per layer, so all ranks that share the guard decide the same. That and one
read by the host happen after a measured step; a step itself never waits, and on other steps nothing of this runs. A check with non-finite
values, whose step is skipped, counts for neither side.

What a CUDA graph has captured does not change: after a change, drop it and capture again. Fused blocks (`msamp.nn.block`) compute in FP8
only, so a transformer layer with a raised linear layer runs its modules one by one.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from msamp.nn.cast_scales import tally_operand_
from msamp.nn.expert_matrices import ExpertMatrices
from msamp.nn.gemm import LayerGemm
from msamp.nn.scaling_state import GRAD_OUTPUT, INPUT, PRODUCTS, LinearScaling
from msamp.numerics import accumulation
from msamp.numerics.metrics import TALLY, judge
from msamp.numerics.stochastic_rounding import unwrapped
from msamp.numerics.tensor import ScalingTensor

TENSORS = ("input", "grad_output", "weight")
SUMS = 6  # columns of a tally that ranks add
EVERY, RAISE_AFTER, RETURN_AFTER = 50, 2, 4
_SHRUNK = "sums of"  # how the reason for raising such a layer begins


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a cast may lose.

    Attributes:
        saturation: largest share of the elements at the format's largest value, in [0, 1].
        underflow: largest share of the non-zero elements that become zero, in [0, 1].
        sqnr_db: smallest SQNR in dB. Rounding to E4M3 costs 31 dB, to E5M2 25 dB, whatever the values are.
        shrinkage: largest share by which sums of products are too small. Fast accumulation loses up to 7 % over 4,096 products.

    Raises:
        ValueError: for a bound out of range.
    """

    saturation: float = 1e-3
    underflow: float = 0.5
    sqnr_db: float = 15.0
    shrinkage: float = 0.02

    def __post_init__(self) -> None:
        for name in ("saturation", "underflow", "shrinkage"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {value!r}")
        if not math.isfinite(self.sqnr_db):
            raise ValueError(f"sqnr_db is {self.sqnr_db!r}; it must be a finite number of dB")

    def broken_by(self, tensor: str, tally: Sequence[float]) -> "Finding | None":
        """Return the first of the three bounds of a cast that it does not keep; None if it keeps all.

        Args:
            tensor: one of `TENSORS`.
            tally: the first six numbers of `msamp.numerics.metrics.TALLY`, of at least one element.
        """
        verdict = judge([*tally, 0.0, 1.0])
        for name, bound in asdict(self).items():
            value = verdict.get(name, 0.0)
            if value < bound if name == "sqnr_db" else value > bound:
                return Finding(tensor, name, value, bound)
        return None


class Finding(NamedTuple):
    """A cast, or a product, that does not keep a bound: its tensor, the quantity (a field of `Bounds`), its value and the bound."""

    tensor: str
    quantity: str
    value: float
    bound: float

    def __str__(self) -> str:
        if self.quantity == "sqnr_db":
            return f"{self.tensor} SQNR {self.value:.1f} dB, below {self.bound:g}"
        if self.quantity == "shrinkage":
            return f"{_SHRUNK} {self.tensor} are {self.value:.2%} too small, above {self.bound:.2%}"
        return f"{self.tensor} {self.quantity} {self.value:.3g}, above {self.bound:g}"


@dataclass
class LayerState:
    """What a guard knows of a layer.

    Attributes:
        raised: whether it computes in BF16.
        since: the step after which it was raised.
        count: checks in a row that speak for a change: bad ones in FP8, good ones in BF16.
        why: the finding that raised it, as text; "" in FP8.
    """

    raised: bool = False
    since: int = 0
    count: int = 0
    why: str = ""


class Change(NamedTuple):
    """A layer that a check raised, or returned to FP8.

    Attributes:
        step: after which.
        layer: its name.
        raised: whether it was raised.
        why: what raised it, also for a return.
        steps: how long it was raised, for a return; else 0.
    """

    step: int
    layer: str
    raised: bool
    why: str
    steps: int

    def __str__(self) -> str:
        if self.raised:
            return f"{self.layer} computes in BF16 from now on: {self.why}"
        return f"{self.layer} returns to FP8 after {self.steps} steps in BF16 ({self.why})"


class Guarded(NamedTuple):
    """A layer under guard: its module, and the attribute of its weight."""

    module: nn.Module
    weight_name: str

    @property
    def scaling(self) -> LinearScaling:
        return self.module.scaling  # type: ignore[return-value]

    @property
    def weight(self) -> ScalingTensor:
        weight = getattr(self.module, self.weight_name)
        assert isinstance(weight, ScalingTensor)
        return weight


def linear_layers(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Guarded]]:
    """Yield the FP8 linear layers among named modules. Experts are not among them: no guard raises their grouped GEMMs."""
    for name, module in modules:
        if isinstance(module._modules.get("scaling"), LinearScaling) and not isinstance(module, ExpertMatrices):
            for attribute, p in module._parameters.items():
                if isinstance(p, ScalingTensor):
                    yield unwrapped(name), Guarded(module, attribute)


class LayerGuard:
    """Measures the FP8 linear layers of a model and raises them; the module's docstring explains it.

    `arm` before a step and `check` after it; `due` says for which. `msamp.PrecisionGuard` does both in your own loop.

    Args:
        layers: this rank's layers by name.
        bounds: of their casts.
        every: steps from one check to the next.
        raise_after, return_after: checks in a row for a change.
        group: the ranks that decide together; None for one rank.
        names: of all layers of all ranks of `group`, in the same order on each; None: the names of `layers`, which all ranks have.
        device: of the sums; None: of the layers, of which there is at least one.

    Attributes:
        armed: whether the next step is measured.

    Raises:
        ValueError: for a number out of range, no layer at all, or a layer that another guard has raised.
    """

    def __init__(
        self,
        layers: Mapping[str, Guarded],
        *,
        bounds: Bounds | None = None,
        every: int = EVERY,
        raise_after: int = RAISE_AFTER,
        return_after: int = RETURN_AFTER,
        group: dist.ProcessGroup | None = None,
        names: Sequence[str] | None = None,
        device: torch.device | None = None,
    ) -> None:
        for what, value in (("every", every), ("raise_after", raise_after), ("return_after", return_after)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{what} is {value!r}; it must be an integer of at least 1")
        self.layers, self.names = dict(layers), list(layers if names is None else names)
        if not self.names:
            raise ValueError("the model has no FP8 linear layer that could be guarded; convert it first, or drop the guard")
        for name, layer in self.layers.items():
            if layer.scaling.raised or layer.scaling.checks:
                raise ValueError(f"{name} is under another guard; use that one, or call its release() first")
        self.bounds = Bounds() if bounds is None else bounds
        self.every, self.raise_after, self.return_after, self.group = every, raise_after, return_after, group
        self.states = {name: LayerState() for name in self.names}
        self.armed = False
        device = next(iter(self.layers.values())).weight.device if device is None else device
        # Static memory, which graphs write.
        self._table = torch.zeros(len(self.names), len(TENSORS), len(TALLY), dtype=torch.float64, device=device)
        self._sums = torch.zeros(len(self.names), len(PRODUCTS), len(accumulation.SUMS), dtype=torch.float64, device=device)

    @property
    def raised(self) -> dict[str, LayerState]:
        """The layers that compute in BF16, by name."""
        return {name: state for name, state in self.states.items() if state.raised}

    def due(self, step: int) -> bool:
        """Return whether a step, counted from 1, is measured."""
        return step % self.every == 0

    def arm(self) -> None:
        """Measure the casts of the next step: its forwards with gradients, and their backwards."""
        self.armed = True
        self._table.zero_()
        self._sums.zero_()
        for number, name in enumerate(self.names):
            if name in self.layers:
                scaling = self.layers[name].scaling
                scaling.sums["guard"] = dict(zip(PRODUCTS, self._sums[number], strict=True))
                for row, tensor in ((INPUT, "input"), (GRAD_OUTPUT, "grad_output")):
                    scaling.checks[row] = functools.partial(tally_operand_, self._table[number, TENSORS.index(tensor)])

    def disarm(self) -> None:
        """Measure no longer."""
        self.armed = False
        for layer in self.layers.values():
            layer.scaling.checks.clear()
            layer.scaling.sums.pop("guard", None)

    def check(self, step: int) -> list[Change]:
        """Judge what the armed step measured, and raise and return layers. Collective; it waits for the device.

        Returns:
            The changes, of all ranks' layers, the same on every rank.

        Raises:
            ValueError: on every rank, if no cast was measured.
        """
        self.disarm()
        self._weights()
        sums = torch.cat([self._table[..., :SUMS].flatten(1), self._sums.flatten(1)], 1)
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(sums, group=self.group)
        casts, products = sums.split([len(TENSORS) * SUMS, self._sums[0].numel()], 1)
        tallies, shrunk = casts.reshape(-1, len(TENSORS), SUMS).tolist(), products.reshape(self._sums.shape).tolist()
        idle = self.layers and all(layer.scaling.in_bf16 for layer in self.layers.values())  # nothing is cast (`msamp.nn.layer_gains`)
        if not idle and not any(tally[0] for layer in tallies for tally in layer[: TENSORS.index("weight")]):
            raise ValueError(
                f"no FP8 layer ran in step {step}, so the guard measured nothing: call step() once per training step, and run every "
                f"{self.every}-th step outside of a CUDA graph that was captured before"
            )
        changes = [self._judge(step, *layer) for layer in zip(self.names, tallies, shrunk, strict=True)]
        return [change for change in changes if change is not None]

    @torch.no_grad()
    def _weights(self) -> None:
        """Measure the casts of weights that GEMMs cast."""
        for number, name in enumerate(self.names):
            if name in self.layers:
                layer = self.layers[name]
                if layer.weight.format != layer.scaling.gemm.weight.format and not layer.scaling.in_bf16:
                    values, operand = LayerGemm.of(layer.scaling, layer.weight).weight_cast(layer.weight)
                    tally_operand_(self._table[number, TENSORS.index("weight")], values, operand.codes, operand.element_scale_inv)

    def _judge(self, step: int, name: str, tallies: Sequence[Sequence[float]], products: Sequence[Sequence[float]]) -> Change | None:
        """Count a check of a layer; return its change, if that is one."""
        state, measured = self.states[name], [(tensor, tally) for tensor, tally in zip(TENSORS, tallies, strict=True) if tally[0]]
        if not measured or not all(math.isfinite(number) for _, tally in measured for number in tally):
            return None
        if state.raised and state.why.startswith(_SHRUNK):
            return None
        findings = [finding for tensor, tally in measured if (finding := self.bounds.broken_by(tensor, tally)) is not None]
        shrunk = ((product, 1 - accumulation.judge_sums(sums)[0]) for product, sums in zip(PRODUCTS, products, strict=True))
        bound = self.bounds.shrinkage
        findings += [Finding(product, "shrinkage", share, bound) for product, share in shrunk if share > bound]
        state.count = state.count + 1 if bool(findings) != state.raised else 0
        if state.count < (self.return_after if state.raised else self.raise_after):
            return None
        steps, why = (step - state.since, state.why) if state.raised else (0, str(findings[0]))
        self.states[name] = LayerState() if state.raised else LayerState(raised=True, since=step, why=why)
        self._apply(name)
        return Change(step, name, not state.raised, why, steps)

    def _apply(self, name: str) -> None:
        if name in self.layers:
            self.layers[name].scaling.raised = self.states[name].raised

    def release(self) -> None:
        """Return all layers to FP8 and measure no longer."""
        self.disarm()
        self.states = {name: LayerState() for name in self.names}
        for name in self.names:
            self._apply(name)

    def state_dict(self) -> dict[str, Any]:
        """Return the layers that are raised or about to change, as JSON types; the same on every rank."""
        return {"layers": {name: asdict(state) for name, state in self.states.items() if state != LayerState()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, which another grid may have saved.

        Raises:
            ValueError: for a state that no guard returns, or a layer that is not guarded here. Nothing has changed then.
        """
        check_state(state)
        unknown = sorted(set(state["layers"]) - set(self.names))
        if unknown:
            raise ValueError(f"the guard's state has {unknown[0]}, which is not an FP8 linear layer of this model; load this model's state")
        self.disarm()
        self.states = {name: LayerState(**state["layers"].get(name, {})) for name in self.names}
        for name in self.names:
            self._apply(name)

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise ValueError("a guard of several processes cannot be copied or pickled; save state_dict(), and load it into a new one")
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.armed:  # copies of layers have no callbacks
            seen, summed = self._table.clone(), self._sums.clone()
            self.arm()
            self._table.copy_(seen)
            self._sums.copy_(summed)

    def __repr__(self) -> str:
        listed = ", ".join(f"{name} {value:g}" for name, value in asdict(self.bounds).items())
        return f"{type(self).__name__}({len(self.names)} layers, every {self.every} steps, {listed}, {len(self.raised)} raised)"


def check_state(state: Any) -> None:
    """Raise a ValueError unless `LayerGuard.state_dict` can have returned this."""
    if not is_state(state):
        raise ValueError(f"the guard's state is {state!a:.80}; it must be what state_dict() of a guard returned")


def is_state(state: Any) -> bool:
    """Return whether `LayerGuard.state_dict` can have returned this; other keys than "layers" are ignored."""
    layers = state.get("layers") if isinstance(state, Mapping) else None
    return isinstance(layers, Mapping) and all(isinstance(name, str) and _is_layer(one) for name, one in layers.items())


def _is_layer(entry: Any) -> bool:
    match entry:
        case {"raised": bool(), "since": int(since), "count": int(count), "why": str(), **more}:
            return not more and min(since, count) >= 0
    return False
