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
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from msamp.kernels import ops
from msamp.kernels.reference.adamw import Batch, stored_amaxes
from msamp.kernels.reference.adamw import adamw as reference_adamw
from msamp.kernels.reference.coat_adamw import coat_adamw as reference_coat_adamw
from msamp.kernels.reference.collage import VARIANTS
from msamp.kernels.reference.collage import collage as reference_collage
from msamp.kernels.tables import Tables
from msamp.numerics import formats as known_formats
from msamp.numerics.formats import BF16, REMAINDER_E4M3, Format
from msamp.numerics.range_expand import Expanded
from msamp.numerics.recipe import StateFormats
from msamp.numerics.tensor import ScalingTensor

WEIGHT = "weight"  # of the pieces of a parameter's memory, the one that is no state: the parameter itself
Formats = Mapping[str, str]  # as `format_names` gives them


def format_names(states: StateFormats) -> dict[str, str]:
    """The formats and the update as plain strings: what stands in `param_groups[i]["formats"]` and in checkpoints."""
    return {f.name: str(getattr(states, f.name)) for f in fields(states)}


def formats_of(group: Mapping[str, Any]) -> list[Formats]:
    """What `group["formats"]` says of each parameter of a group: one mapping for all, or a list with one for each."""
    given = group["formats"]
    return list(given) if isinstance(given, list | tuple) else [given] * len(group["params"])


def named_formats(given: Any, count: int) -> dict[str, str] | list[dict[str, str]]:
    """What stands in `group["formats"]` of so many parameters: from StateFormats or its names, one for all or a list with one for each; as
    one for all where they are alike.

    Raises:
        ValueError: for a list of another length.
    """
    if not isinstance(given, list | tuple):
        return format_names(given) if isinstance(given, StateFormats) else dict(given)
    if len(given) != count:
        raise ValueError(f"{len(given)} formats are given for {count} parameters; give one for all, or one for each")
    names = [format_names(each) if isinstance(each, StateFormats) else dict(each) for each in given]
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
        kept: keys of the states whose amaxes it wants kept from step to step.
        in_fp32: name of the update that computes in FP32 what this one computes in its own arithmetic; None: it does so itself, given
            FP32 states. Rehearsals compare with it.
    """

    name: str
    states: tuple[State, ...]
    kept: tuple[str, ...] = ()
    in_fp32: str | None = None

    @property
    def master_row(self) -> int:
        """The master's row in the table of amaxes; the last that the update reads."""
        return 1 + len(self.kept)

    def check_group(self, states: Formats, decoupled: bool) -> None:
        """ValueError for formats or a kind of weight decay that this update does not take. The base class refuses a format in groups for
        a state whose amax it keeps: such a state has no one scale."""
        for state in self.states:
            fmt = state.format_beside(known_formats.FP32, states)
            if fmt is not None and fmt.group and state.key in self.kept:
                raise ValueError(
                    f"{state.format} is {fmt}, which has no scale of a whole tensor, and update {self.name!r} keeps the amax of "
                    f"{state.key}; choose one of {', '.join(map(str, known_formats.ALL))}"
                )

    def check_parameter(self, p: torch.Tensor) -> None:  # noqa: B027 - most updates take every parameter
        """ValueError for a parameter that this update does not take."""

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
        weight_remainders=launch.states.get("weight_remainder", []),
        v_remainders=launch.states.get("exp_avg_sq_remainder", []),
    )


class AdamW(Update):
    """AdamW in FP32 on states of any format: `kernels.reference.adamw`, and `coat_adamw` where a moment is COAT's."""

    def check_group(self, states: Formats, decoupled: bool) -> None:
        """Takes everything."""

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        """A `Hyper`, and the logarithms of its betas."""
        return [*super().numbers(group), *(math.log(beta) if beta else -math.inf for beta in group["betas"])]

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
        update(tables, batch, launch.hyper, amaxes, kept, coefficient, usable, decoupled=launch.group["decoupled"])


class Collage(AdamW):
    """AdamW in BF16, a row of `kernels.reference.collage.VARIANTS` [Collage, algorithm 2 and Table 2]."""

    def check_group(self, states: Formats, decoupled: bool) -> None:
        """Takes BF16 in all four formats, and decoupled decay."""
        if not decoupled:
            raise ValueError(f"decoupled is False; update {self.name!r} has AdamW's decay alone: leave it True, or take update fp32")
        four = {key: states[key] for key in ("master", "grad", "m", "v")}
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


_KNOWN: dict[str, Update] = {
    "fp32": AdamW("fp32", (MASTER, *MOMENTS), kept=("exp_avg", "exp_avg_sq")),
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
    legal = [f.name for f in fields(StateFormats) if f.name not in ("grad", "update")]
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
