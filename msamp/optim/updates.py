"""The updates that an optimizer can take, each declared once: its states, what it refuses, and how it is launched and emulated.

The optimizer, its rehearsal, ZeRO, checkpoints, the plan of memory and the reports iterate over what an update declares. None of them
names a state. So a new update is one object, which may stand in a user's own file:

    class Momentum(Update):
        def run(self, tables, launch, amaxes, kept, coefficient, usable): ...

    updates.register(Momentum("momentum", (MASTER, State("momentum_buffer", "m", "momentum")), kept=("momentum_buffer",)))
    optimizer = FP8AdamW(params, formats=StateFormats(m=E4M3, update="momentum"))

Every process registers it before it builds an optimizer.

A state is a tensor in the shape of its parameter. Where ZeRO cuts a parameter into rows, the state is cut into the same rows; what a
format keeps for groups of a row (COAT) goes with the row. The number of steps, FP32 0-dim under the key `step`, is every update's and is
not declared.

**Scales.** A scaled state is stored in one pass, so its scale must be known before its values. It follows from a bound, and the bound from
the amax of the state as it was last stored, over the whole parameter. An update names the states of which it wants this amax (`kept`);
the optimizer keeps and combines them over the ranks, and hands them to `run` as rows of one table: 0 the gradient's (`GRAD`), then those
of `kept` in their order, then the master's.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from msamp.kernels import ops
from msamp.kernels.reference.adamw import GRAD, Batch, Hyper, hyper_numbers, stored_amaxes
from msamp.kernels.reference.adamw import adamw as reference_adamw
from msamp.kernels.reference.coat_adamw import coat_adamw as reference_coat_adamw
from msamp.kernels.reference.collage import VARIANTS
from msamp.kernels.reference.collage import collage as reference_collage
from msamp.kernels.reference.momentum import ADJUSTMENTS, COEFFICIENTS, Number, heavy_ball_, muon_
from msamp.kernels.reference.store import Rounding, load, rounding_of, store_
from msamp.kernels.tables import Tables
from msamp.numerics import formats as known_formats
from msamp.numerics.formats import BF16, REMAINDER_E4M3, Format
from msamp.numerics.range_expand import Expanded
from msamp.numerics.recipe import StateFormats
from msamp.numerics.stochastic_rounding import Thresholds
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.states import local, payload, scale_inv, warn_of

WEIGHT = "weight"  # of the pieces of a parameter's memory, the one that is no state: the parameter itself
Formats = Mapping[str, str]  # as `format_names` gives them
ROUNDING_FIELDS = ("master_rounding", "moment_rounding")  # of StateFormats: how states are stored, which changes no format


def check_range(name: str, value: float, low: float, high: float) -> None:
    """ValueError naming a value that is not in [low, high), and the range."""
    if not low <= value < high:
        raise ValueError(f"{name} is {value}; it must be in [{low}, {high})")


def format_names(states: StateFormats) -> dict[str, str]:
    """The formats and the update as plain strings: what stands in `param_groups[i]["formats"]` and in checkpoints."""
    return {f.name: str(getattr(states, f.name)) for f in fields(states)}


def formats_of(group: Mapping[str, Any]) -> list[Formats]:
    """What `group["formats"]` says of each parameter of a group: one mapping for all, or a list with one for each."""
    given = group["formats"]
    return list(given) if isinstance(given, list | tuple) else [given] * len(group["params"])


def _named(given: Any) -> dict[str, str]:
    """Names that say nothing of rounding were saved when there was nearest alone."""
    return format_names(given) if isinstance(given, StateFormats) else dict.fromkeys(ROUNDING_FIELDS, "nearest") | dict(given)


def named_formats(given: Any, count: int) -> dict[str, str] | list[dict[str, str]]:
    """What stands in `group["formats"]` of so many parameters: from StateFormats or its names, one for all or a list with one for each; as
    one for all where they are alike.

    Raises:
        ValueError: for a list of another length.
    """
    if not isinstance(given, list | tuple):
        return _named(given)
    if len(given) != count:
        raise ValueError(f"{len(given)} formats are given for {count} parameters; give one for all, or one for each")
    names = [_named(each) for each in given]
    return names[0] if names and all(each == names[0] for each in names) else names


@dataclass(frozen=True)
class State:
    """What an update keeps of every element of a parameter.

    Attributes:
        key: its name in `optimizer.state` and in checkpoints.
        format: the field of StateFormats that says how it is stored ("master", "m", "v"), or one format for all recipes.
        column: under which name reports count its bytes and its rounding: "master", "m", "v", or another.
        copy: it begins as a copy of the parameter, which is cast from it at every step. It is not kept where the parameter is itself
            stored in its format. Else a state begins at zero.
        remainder_of: key of the state of which this is the second component of a pair, or `WEIGHT`; None: it is a number by itself.
        non_negative: it holds no value below 0, such as an average of squares: what is loaded is held to it.
    """

    key: str
    format: str | Format
    column: str
    copy: bool = False
    remainder_of: str | None = None
    non_negative: bool = False

    def format_beside(self, weight: Format, states: Formats) -> Format | None:
        """In which format it is kept beside a parameter that is stored as `weight`; None where it is not kept."""
        fmt = self.format if isinstance(self.format, Format) else known_formats.by_name(states[self.format])
        return None if self.copy and fmt == weight else fmt


MASTER = State("master", "master", "master", copy=True)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Parameters, or rows of parameters, that are updated together: each list has one entry for each, and its tensors are all plain and of
    one dtype, or ScalingTensors or Expanded of one format.

    Attributes:
        group: their parameter group.
        formats: theirs, of the group's.
        hyper: FP64 on the device, the update's `numbers` of the group.
        by_rows: whether all tensors are laid out by rows, as kernels want them.
        grads: any format; only read.
        masters: what is updated in place.
        weights: what is cast from the masters as stored; empty where the masters are the weights.
        states: by key, all that the update declares but for the master, changed in place, their scales too.
        steps: FP32 0-dim, the number of steps taken, raised by one.
        indices: column of each in the table of amaxes of whole tensors.
        places: column of each in the table of amaxes as stored.
        keys, offsets: of each one's thresholds for stochastic rounding: of its parameter, and index of its first element there.
    """

    group: dict[str, Any]
    formats: Formats
    hyper: torch.Tensor
    by_rows: bool
    grads: list[torch.Tensor]
    masters: list[torch.Tensor]
    weights: list[torch.Tensor]
    states: dict[str, list[Any]]
    steps: list[torch.Tensor]
    indices: list[int]
    places: list[int]
    keys: list[int]
    offsets: list[int]

    @property
    def rounding(self) -> Rounding:
        """How moments and masters are stored."""
        moments, masters = (self.formats.get(name, "nearest") for name in ("moment_rounding", "master_rounding"))
        return rounding_of(moments, masters, known_formats.by_name(self.formats["v"]), self.group.get("betas", (0.0, 0.0))[1])

    @property
    def update(self) -> "Update":
        """The update of these formats."""
        return by_name(self.formats["update"])


@dataclass(frozen=True)
class Update(ABC):
    """One way to update parameters.

    Attributes:
        name: what `StateFormats.update` calls it.
        states: all that it keeps, in the order in which checkpoints hold them.
        kept: keys of the states with amaxes that are kept from step to step.
        in_fp32: name of the update that computes in FP32 what this one computes in its own arithmetic; None: it does so itself, given
            FP32 states. Rehearsals compare with it.
        whole: it takes whole parameters alone: a process that updates some rows of one is refused.
    """

    name: str
    states: tuple[State, ...]
    kept: tuple[str, ...] = ()
    in_fp32: str | None = None
    whole: bool = False

    @property
    def master_row(self) -> int:
        """The master's row in the table of amaxes; the last that the update reads."""
        return 1 + len(self.kept)

    def check_group(self, states: Formats, decoupled: bool) -> None:
        """ValueError for formats or a kind of weight decay that this update does not take. The base class refuses a format in groups for
        a state with a kept amax: such a state has no one scale."""
        for state in self.states:
            fmt = state.format_beside(known_formats.FP32, states)
            if fmt is not None and fmt.group and state.key in self.kept:
                raise ValueError(
                    f"{state.format} is {fmt}, which has no scale of a whole tensor, and update {self.name!r} keeps the amax of "
                    f"{state.key}; choose one of {', '.join(map(str, known_formats.ALL))}"
                )

    def check_parameter(self, p: torch.Tensor) -> None:  # noqa: B027 - most updates take every parameter
        """ValueError for a parameter that this update does not take."""

    def options(self) -> dict[str, Any]:
        """The hyper-parameters that a parameter group has for this update beside `lr` and `weight_decay`, with their defaults."""
        return {"betas": (0.9, 0.999), "eps": 1e-8}

    def check_numbers(self, group: Mapping[str, Any]) -> None:
        """ValueError naming a hyper-parameter of a parameter group that is out of range, and the range."""
        for name in ("lr", "weight_decay", "eps"):
            if name in group:
                check_range(name, float(group[name]) if name == "lr" else group[name], 0.0, math.inf)
        for i, beta in enumerate(group.get("betas", ())):
            check_range(f"betas[{i}]", beta, 0.0, 1.0)

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        """The hyper-parameters of a parameter group that `run` finds on the device as `launch.hyper`."""
        return [float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]]

    def stored_amaxes(self, launch: Launch) -> torch.Tensor:
        """FP32 [len(kept) + 1, n]: amaxes as stored of the states in `kept` and of the masters; 0 where no scale follows from them."""
        return stored_amaxes([launch.states[key] for key in self.kept], launch.masters, launch.weights, decoupled=launch.group["decoupled"])

    @abstractmethod
    def run(
        self,
        tables: Tables,
        launch: Launch,
        amaxes: torch.Tensor,
        kept: torch.Tensor,
        coefficient: torch.Tensor | None,
        usable: torch.Tensor,
    ) -> None:
        """Update everything in `launch`, or nothing at all where the step is not usable. A CUDA graph can hold it if it does not wait for
        the host.

        Args:
            tables: where a kernel keeps its table of addresses.
            launch: the tensors.
            amaxes: FP32 [master_row + 1 or more, parameters]: of gradient, `kept` and master as stored, of whole tensors.
            kept: FP32 [master_row or more, pieces], changed in place: what `stored_amaxes` gives of the new states, at `launch.places`.
            coefficient: FP32 0-dim: multiplies gradients; None clips nothing.
            usable: bool 0-dim.
        """


MOMENTS = (State("exp_avg", "m", "m"), State("exp_avg_sq", "v", "v", non_negative=True))


def _batch(launch: Launch) -> Batch:
    """What the kernels of both families of AdamW take."""
    return Batch(
        grads=launch.grads,
        ms=launch.states["exp_avg"],
        vs=launch.states["exp_avg_sq"],
        masters=launch.masters,
        weights=launch.weights,
        steps=launch.steps,
        indices=launch.indices,
        places=launch.places,
        keys=launch.keys,
        offsets=launch.offsets,
        weight_remainders=launch.states.get("weight_remainder", []),
        v_remainders=launch.states.get("exp_avg_sq_remainder", []),
    )


class AdamW(Update):
    """AdamW in FP32 on states of any format: `kernels.reference.adamw`, and `coat_adamw` where a moment is COAT's."""

    def check_group(self, states: Formats, decoupled: bool) -> None:
        """Takes everything, and warns of what a training was seen to fail with."""
        warn_of(states)

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        """As `hyper_numbers` makes them."""
        return hyper_numbers(Hyper(*super().numbers(group)))

    def run(
        self,
        tables: Tables,
        launch: Launch,
        amaxes: torch.Tensor,
        kept: torch.Tensor,
        coefficient: torch.Tensor | None,
        usable: torch.Tensor,
    ) -> None:
        batch = _batch(launch)
        coat = any(isinstance(states[0], Expanded) for states in (batch.ms, batch.vs))
        kernel, twin = (ops.coat_adamw, reference_coat_adamw) if coat else (ops.adamw, reference_adamw)
        update = kernel if launch.by_rows else twin
        decoupled, rounding = launch.group["decoupled"], launch.rounding
        update(tables, batch, launch.hyper, amaxes, kept, coefficient, usable, decoupled=decoupled, rounding=rounding)


class Collage(AdamW):
    """AdamW in BF16, a row of `kernels.reference.collage.VARIANTS` [Collage, algorithm 2 and Table 2]."""

    def check_group(self, states: Formats, decoupled: bool) -> None:
        """Takes BF16 in all four formats, and decoupled decay."""
        if not decoupled:
            raise ValueError(f"decoupled is False; update {self.name!r} has AdamW's decay alone: leave it True, or take update fp32")
        four = {key: states[key] for key in ("master", "grad", "m", "v")}
        if any(states.get(name) == "stochastic" for name in ROUNDING_FIELDS):
            raise ValueError(
                f"update {self.name!r} computes and rounds in BF16, to nearest, and stochastic rounding is asked for; give nearest, or "
                "take update fp32"
            )
        if set(four.values()) != {BF16.name}:
            given = ", ".join(f"{key} {fmt}" for key, fmt in four.items())
            raise ValueError(f"update {self.name!r} computes in BF16, and the formats are {given}; give bf16 for all four, or update fp32")

    def check_parameter(self, p: torch.Tensor) -> None:
        """Takes plain BF16."""
        if isinstance(p, ScalingTensor) or p.dtype is not torch.bfloat16:
            kind = "a ScalingTensor" if isinstance(p, ScalingTensor) else p.dtype
            raise ValueError(f"a parameter is {kind}; update {self.name!r} takes plain torch.bfloat16: give model.bfloat16() as it is")

    def run(
        self,
        tables: Tables,
        launch: Launch,
        amaxes: torch.Tensor,
        kept: torch.Tensor,
        coefficient: torch.Tensor | None,
        usable: torch.Tensor,
    ) -> None:
        update = ops.collage if launch.by_rows else reference_collage
        update(tables, _batch(launch), launch.hyper, self.name, coefficient, usable)


def _collage(name: str) -> Collage:
    variant = VARIANTS[name]
    fmt = BF16 if variant.remainder is torch.bfloat16 else REMAINDER_E4M3
    states: tuple[State, ...] = MOMENTS
    if variant.weight != "nothing":
        states += (State("weight_remainder", fmt, MASTER.column, remainder_of=WEIGHT),)
    if variant.pair_v:
        states += (State("exp_avg_sq_remainder", fmt, "v", remainder_of="exp_avg_sq"),)
    return Collage(name, states, in_fp32="fp32")


MOMENTUM = State("momentum_buffer", "m", "m")  # the key is torch's


class _Momentum(Update):
    """What SGD and Muon share: at most one state, and torch operations tensor by tensor. On a GPU no step waits for the host, and one that
    is not usable is computed and put back."""

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        return [float(group["lr"]), group["weight_decay"], group["momentum"], group.get("dampening", 0.0)]

    def run(
        self,
        tables: Tables,
        launch: Launch,
        amaxes: torch.Tensor,
        kept: torch.Tensor,
        coefficient: torch.Tensor | None,
        usable: torch.Tensor,
    ) -> None:
        if not usable.is_cuda and not usable:
            return
        numbers: list[Number] = list(launch.hyper.unbind()) if launch.hyper.is_cuda else launch.hyper.tolist()
        mine = amaxes[:, launch.indices]
        g_amax = mine[GRAD] if coefficient is None else mine[GRAD] * coefficient
        if launch.group["weight_decay"] and not launch.group["decoupled"]:  # the decay is part of the gradient
            g_amax = g_amax + numbers[1] * mine[self.master_row]
        bounds = self.bounds(numbers, mine, g_amax, torch.stack(launch.steps) == 0) if self.kept else g_amax
        for i, g in enumerate(launch.grads):
            values = fp32_values(g) if coefficient is None else fp32_values(g) * coefficient
            stored = [x[i : i + 1] for x in (launch.states.get(MOMENTUM.key, []), launch.masters, launch.weights) if x]
            before = [x.clone() for x in _memory(stored)] if usable.is_cuda else []
            self._update(launch, i, values, numbers, (bounds[i : i + 1], 2.0 * mine[self.master_row, i : i + 1]))
            for x, old in zip(_memory(stored), before, strict=False):
                x.copy_(torch.where(usable, x, old))
        torch._foreach_add_(launch.steps, usable.float())
        kept[: self.master_row, launch.places] = self.stored_amaxes(launch)

    def _update(
        self, launch: Launch, i: int, g: torch.Tensor, numbers: Sequence[Number], bounds: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Load, update, store one parameter."""
        buffers, masters = (x[i : i + 1] for x in (launch.states.get(MOMENTUM.key, []), launch.masters))
        (p,), buffer = load(masters), load(buffers)
        silent = [self.no_gradient(p, g, launch)] if buffer else None
        self.change_(p, g, buffer[0] if buffer else None, launch, launch.steps[i] == 0, numbers)
        step = launch.steps[i] + 1 if launch.steps[i].is_cuda else int(launch.steps[i]) + 1
        drawn = [Thresholds(launch.keys[i], launch.offsets[i], step)]
        if buffer:
            store_(buffers, buffer, bounds[0], drawn if launch.rounding.m else None, "m", silent=silent)
        store_(masters, [p], bounds[1], drawn if launch.rounding.masters else None, "master")
        if launch.weights:
            store_(launch.weights[i : i + 1], load(masters), bounds[1])

    @staticmethod
    def no_gradient(p: torch.Tensor, g: torch.Tensor, launch: Launch) -> torch.Tensor:
        """bool, where neither a gradient nor a decay in it moves the momentum: there its code has to fall."""
        decays = launch.group["weight_decay"] and not launch.group["decoupled"]
        return (g == 0) & (p == 0) if decays else g == 0

    @abstractmethod
    def bounds(self, numbers: Sequence[Number], amaxes: torch.Tensor, g_amax: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """FP32 [n], no less than the new momenta: from the table's columns, the amaxes of the clipped and decayed gradients, and bool [n],
        whether it is their first step."""

    @abstractmethod
    def change_(
        self,
        p: torch.Tensor,
        g: torch.Tensor,
        buffer: torch.Tensor | None,
        launch: Launch,
        first: torch.Tensor,
        numbers: Sequence[Number],
    ) -> None:
        """Update master and momentum in FP32, in place; `g` is only read."""


class SGD(_Momentum):
    """torch.optim.SGD: `sgd` without a state, `sgd-momentum` with one. The decay is part of the gradient, or with `decoupled` shrinks
    the weight."""

    def options(self) -> dict[str, Any]:
        return {"momentum": 0.9 if self.kept else 0.0, "dampening": 0.0, "nesterov": False}

    def check_numbers(self, group: Mapping[str, Any]) -> None:
        super().check_numbers(group)
        momentum, dampening = group["momentum"], group["dampening"]
        check_range("momentum", momentum, 0.0, math.inf)
        check_range("dampening", dampening, -math.inf, math.inf)
        if momentum and not self.kept:
            raise ValueError(f"momentum is {momentum}, and update 'sgd' keeps no state for it; give 0, or take update 'sgd-momentum'")
        if group["nesterov"] and (dampening or not momentum):
            raise ValueError(f"nesterov is True with momentum {momentum} and dampening {dampening}; it takes a momentum and no dampening")

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        self.check_numbers(group)  # schedulers write momenta
        return super().numbers(group)

    def bounds(self, numbers: Sequence[Number], amaxes: torch.Tensor, g_amax: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        _, _, momentum, dampening = numbers
        share = torch.as_tensor(1 - dampening, device=first.device).abs()
        return momentum * amaxes[1] + torch.where(first, torch.ones_like(share), share).float() * g_amax

    def change_(
        self,
        p: torch.Tensor,
        g: torch.Tensor,
        buffer: torch.Tensor | None,
        launch: Launch,
        first: torch.Tensor,
        numbers: Sequence[Number],
    ) -> None:
        lr, weight_decay, momentum, dampening = numbers
        group = launch.group
        decay, dampened = weight_decay if group["weight_decay"] else None, first if group["dampening"] else None
        flags = {name: bool(group[name]) for name in ("nesterov", "decoupled")}
        heavy_ball_(p, g, buffer, lr, momentum, dampening, decay, dampened, **flags)


class Muon(_Momentum):
    """torch.optim.Muon: momentum of whole matrices, orthogonalised in BF16 [Jordan et al. 2024]; `adjust_lr_fn` "match_rms_adamw" is the
    scale of [Liu et al. 2025, section 2.2]. Vectors, embeddings and the head want AdamW, in a group of their own."""

    def options(self) -> dict[str, Any]:
        return {
            "momentum": 0.95,
            "nesterov": True,
            "ns_coefficients": COEFFICIENTS,
            "eps": 1e-7,
            "ns_steps": 5,
            "adjust_lr_fn": None,
        }

    def check_group(self, states: Formats, decoupled: bool) -> None:
        """Takes decoupled decay."""
        super().check_group(states, decoupled)
        if not decoupled:
            raise ValueError("decoupled is False; update 'muon' has decoupled decay alone: leave it True, or take update fp32")

    def check_parameter(self, p: torch.Tensor) -> None:
        """Takes whole matrices."""
        if p.dim() != 2:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is no matrix, and update 'muon' takes matrices alone; give it to AdamW, in a "
                "parameter group of update fp32"
            )
        if local(p) is not p or getattr(p, "tensor_model_parallel", False):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is cut over processes (tensor parallelism or fully_shard), and update 'muon' "
                "orthogonalises whole matrices; take AdamW or SGD, or spread the optimizer alone (zero=True)"
            )

    def check_numbers(self, group: Mapping[str, Any]) -> None:
        super().check_numbers(group)
        check_range("momentum", group["momentum"], 0.0, 1.0)
        if not 0 <= group["ns_steps"] < 100:
            raise ValueError(f"ns_steps is {group['ns_steps']}; it must be in [0, 100)")
        if len(group["ns_coefficients"]) != 3:
            raise ValueError(f"ns_coefficients are {group['ns_coefficients']}; give three")
        if group["adjust_lr_fn"] not in ADJUSTMENTS:
            legal = ", ".join(map(repr, ADJUSTMENTS))
            raise ValueError(f"adjust_lr_fn is {group['adjust_lr_fn']!r}; choose one of {legal}")

    def bounds(self, numbers: Sequence[Number], amaxes: torch.Tensor, g_amax: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        momentum = numbers[2]
        return momentum * amaxes[1] + (1 - momentum) * g_amax

    def change_(
        self,
        p: torch.Tensor,
        g: torch.Tensor,
        buffer: torch.Tensor | None,
        launch: Launch,
        first: torch.Tensor,
        numbers: Sequence[Number],
    ) -> None:
        assert buffer is not None
        lr, weight_decay, momentum, _ = numbers
        options = {name: launch.group[name] for name in self.options() if name != "momentum"}
        muon_(p, g, buffer, lr, momentum, weight_decay if launch.group["weight_decay"] else None, **options)


def _memory(stored: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Payloads, those of FP8 as bytes, and scales, in their memory."""
    found = []
    for x in (x for xs in stored for x in xs):
        own, scale = payload(x), scale_inv(x)
        found += [own.view(torch.uint8) if own.element_size() == 1 else own, *([] if scale is None else [scale])]
    return found


_KNOWN: dict[str, Update] = {
    "fp32": AdamW("fp32", (MASTER, *MOMENTS), kept=("exp_avg", "exp_avg_sq")),
    "sgd": SGD("sgd", (MASTER,)),
    "sgd-momentum": SGD("sgd-momentum", (MASTER, MOMENTUM), kept=(MOMENTUM.key,)),
    "muon": Muon("muon", (MASTER, MOMENTUM), kept=(MOMENTUM.key,), whole=True),
    **{name: _collage(name) for name, variant in VARIANTS.items() if variant.dtype is torch.bfloat16},
}


def by_name(name: str) -> Update:
    """The update that `StateFormats.update` names.

    Raises:
        ValueError: for an unknown name, listing those known.
    """
    if name not in _KNOWN:
        raise ValueError(f"update {name!r} is unknown; choose one of {', '.join(_KNOWN)}, or register it (msamp.optim.updates.register)")
    return _KNOWN[name]


def updates_of(group: Mapping[str, Any]) -> list[Update]:
    """The updates of a parameter group, each once."""
    given = group["formats"]
    return [by_name(name) for name in dict.fromkeys(formats["update"] for formats in (given if isinstance(given, list) else [given]))]


def take_options(param_group: dict[str, Any], defaults: Mapping[str, Any]) -> set[str]:
    """Give a new parameter group the options of its updates: an optimizer's defaults where the update that these name has the same options,
    else the update's own.

    Returns:
        The options in the defaults that no update of the group takes.

    Raises:
        ValueError: for a number out of range, and for an option in the group that none of its updates takes.
    """
    chosen, usual = updates_of(param_group), by_name(defaults["formats"].update).options().keys()
    foreign = usual - {name for update in chosen for name in update.options()}
    if foreign & param_group.keys():
        names, given = ", ".join(update.name for update in chosen), ", ".join(sorted(foreign & param_group.keys()))
        raise ValueError(f"a group of update {names} is given {given}, which it does not take; leave it out")
    for update in chosen:
        for name, default in update.options().items():
            param_group.setdefault(name, defaults[name] if update.options().keys() == usual else default)
        update.check_numbers({**defaults, **param_group})
    return foreign


def register(update: Update) -> Update:
    """Make an update known by its name, in this process; one that is known already stays. Returns it.

    Raises:
        ValueError: for a name that another update has, and for states that contradict each other.
    """
    if _KNOWN.get(update.name, update) != update:
        raise ValueError(f"update {update.name!r} is known already, as another one; choose another name than {', '.join(_KNOWN)}")
    _check_states(update)
    return _KNOWN.setdefault(update.name, update)


def own_keys() -> set[str]:
    """Keys of the states of all known updates that follow from no other: no master and no remainder, which a weight has a share in."""
    return {state.key for update in _KNOWN.values() for state in update.states if state.remainder_of is None and not state.copy}


def remainders() -> dict[str, str]:
    """Key of each second component of a pair that a known update keeps -> key of its first, or `WEIGHT`."""
    return {state.key: state.remainder_of for update in _KNOWN.values() for state in update.states if state.remainder_of is not None}


def _check_states(update: Update) -> None:
    keys, numbers = [state.key for state in update.states], [state for state in update.states if state.remainder_of is None]
    legal = [f.name for f in fields(StateFormats) if f.name not in ("grad", "update", *ROUNDING_FIELDS)]
    problems = [f"{key} is declared twice" for key in sorted({key for key in keys if keys.count(key) > 1})]
    problems += ["step is the key of the number of steps, which every update has"] if "step" in keys else []
    problems += [f"{state.key}: a key takes no '/', '@' or '.'" for state in update.states if set(state.key) & set("/@.")]
    columns = [state.column for state in numbers]
    problems += [f"two states count in column {column}" for column in sorted({c for c in columns if columns.count(c) > 1})]
    for state in update.states:
        if not isinstance(state.format, Format) and state.format not in legal:
            problems.append(f"{state.key} has format {state.format!r}: give a Format, or one of {', '.join(legal)}")
        if state.copy and state != MASTER:
            problems.append(f"{state.key} is a copy of the parameter: only {MASTER.key} is, declare updates.MASTER")
        if state.remainder_of not in (None, WEIGHT, *keys):
            problems.append(f"{state.key} is the remainder of {state.remainder_of}, which is not among the states")
        elif state.remainder_of is not None and remainders().get(state.key, state.remainder_of) != state.remainder_of:
            problems.append(f"{state.key} is the remainder of {remainders()[state.key]} in another update: choose another key")
    problems += [f"it keeps the amax of {key}, which is not among the states" for key in update.kept if key not in keys]
    problems += [f"it keeps the amax of {MASTER.key}, which every update has: drop it"] if MASTER.key in update.kept else []
    if update.in_fp32 is not None:
        by_name(update.in_fp32)
    if problems:
        raise ValueError(f"update {update.name!r} cannot be registered: {'; '.join(problems)}")
