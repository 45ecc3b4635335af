"""What an update declares: its states, the hyper-parameters and parameters that it takes, and how it runs on a batch of tensors."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from msamp.kernels.reference.adamw import Batch, stored_amaxes
from msamp.kernels.reference.store import Rounding, rounding_of
from msamp.kernels.tables import Tables
from msamp.numerics import formats as known_formats
from msamp.numerics.formats import Format
from msamp.numerics.recipe import StateFormats

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
class UpdateBatch(Batch):
    """A batch of one parameter group, with all that the update declares in `states` but for the master.

    Attributes:
        update: that of their formats.
        group: their parameter group.
        formats: theirs, of the group's.
        hyper: FP64 on the device, the update's `numbers` of the group.
        by_rows: whether all tensors are laid out by rows, as kernels want them.
        The others: as of `msamp.kernels.reference.adamw.Batch`.
    """

    update: "Update"
    group: dict[str, Any]
    formats: Formats
    hyper: torch.Tensor
    by_rows: bool

    @property
    def rounding(self) -> Rounding:
        """How moments and masters are stored."""
        moments, masters = (self.formats.get(name, "nearest") for name in ("moment_rounding", "master_rounding"))
        return rounding_of(moments, masters, known_formats.by_name(self.formats["v"]), self.group.get("betas", (0.0, 0.0))[1])


class StepInputs(NamedTuple):
    """What all batches of a step share.

    Attributes:
        amaxes: FP32 [master_row + 1 or more, parameters]: of gradient, `kept` and master as stored, of whole tensors.
        kept: FP32 [master_row or more, pieces]: what `stored_amaxes` gives of the new states, at `batch.places`.
        coefficient: FP32 0-dim: multiplies gradients; None clips nothing.
        usable: bool 0-dim, whether the step is taken.
    """

    amaxes: torch.Tensor
    kept: torch.Tensor
    coefficient: torch.Tensor | None
    usable: torch.Tensor


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
        """The hyper-parameters of a parameter group that `run` finds on the device as `batch.hyper`."""
        return [float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]]

    def stored_amaxes(self, batch: UpdateBatch) -> torch.Tensor:
        """FP32 [len(kept) + 1, n]: amaxes as stored of the states in `kept` and of the masters; 0 where no scale follows from them."""
        return stored_amaxes([batch.states[key] for key in self.kept], batch.masters, batch.weights, decoupled=batch.group["decoupled"])

    @abstractmethod
    def run(self, tables: Tables, batch: UpdateBatch, inputs: StepInputs) -> None:
        """Update everything in `batch`, or nothing at all where the step is not usable. A CUDA graph can hold it if it does not wait for
        the host.

        Args:
            tables: where a kernel keeps its table of addresses.
            batch: the tensors.
            inputs: of the step; `inputs.kept` is changed in place.
        """
