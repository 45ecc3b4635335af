"""The base class of updates: the states that an update declares, its checks, and how it runs on a batch of tensors."""

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

WEIGHT = "weight"  # the key of the parameter itself, next to the keys of its states
Formats = Mapping[str, str]  # as returned by `format_names`
ROUNDING_FIELDS = ("master_rounding", "moment_rounding")  # fields of StateFormats that do not affect a state's format


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise a ValueError naming the value and the range if the value is not in [low, high)."""
    if not low <= value < high:
        raise ValueError(f"{name} is {value}; it must be in [{low}, {high})")


def format_names(states: StateFormats) -> dict[str, str]:
    """Return the formats and the update as plain strings, as in `param_groups[i]["formats"]` and checkpoints."""
    return {f.name: str(getattr(states, f.name)) for f in fields(states)}


def formats_of(group: Mapping[str, Any]) -> list[Formats]:
    """Return the formats of each parameter of a group; `group["formats"]` is one mapping for all, or a list with one for each."""
    given, params = group["formats"], group["params"]
    if len(group.get("keys", params)) != len(params):
        raise ValueError(
            f"a parameter group has {len(params)} parameters and began with {len(group['keys'])}: its list was edited; call "
            "optimizer.add_param_group for new ones, and requires_grad_(False) for those that are no longer trained"
        )
    return list(given) if isinstance(given, list | tuple) else [given] * len(params)


def _named(given: Any) -> dict[str, str]:
    """Return the names as a dict. Formats that were saved before stochastic rounding existed get nearest rounding."""
    return format_names(given) if isinstance(given, StateFormats) else dict.fromkeys(ROUNDING_FIELDS, "nearest") | dict(given)


def named_formats(given: Any, count: int) -> dict[str, str] | list[dict[str, str]]:
    """Return `group["formats"]` for `count` parameters, from StateFormats or their names, one for all or a list with one for each. Equal
    formats become one for all.

    Raises:
        ValueError: if a list has another length.
    """
    if not isinstance(given, list | tuple):
        return _named(given)
    if len(given) != count:
        raise ValueError(f"{len(given)} formats were passed for {count} parameters; pass one for all, or one for each")
    names = [_named(name) for name in given]
    return names[0] if names and all(name == names[0] for name in names) else names


@dataclass(frozen=True)
class State:
    """A state that an update stores per element of a parameter.

    Attributes:
        key: its name in `optimizer.state` and in checkpoints.
        format: the field of StateFormats with its format ("master", "m", "v"), or one format for all recipes.
        column: the column of reports that counts its bytes and rounding errors: "master", "m", "v", or another.
        copy: whether it starts as a copy of the parameter, which every step casts from it. It is not stored if the parameter itself has
            its format. Other states start at zero.
        remainder_of: key of the state (or `WEIGHT`) of which this is the second component of a pair; None if it is not a remainder.
        non_negative: whether all values are at least 0, as in an average of squares; loaded values are checked.
    """

    key: str
    format: str | Format
    column: str
    copy: bool = False
    remainder_of: str | None = None
    non_negative: bool = False

    def format_beside(self, weight: Format, states: Formats) -> Format | None:
        """Return its format for a parameter that is stored as `weight`; None if it is not stored."""
        fmt = self.format if isinstance(self.format, Format) else known_formats.by_name(states[self.format])
        return None if self.copy and fmt == weight else fmt


MASTER = State("master", "master", "master", copy=True)


@dataclass(frozen=True, kw_only=True)
class UpdateBatch(Batch):
    """A batch of tensors of one parameter group. `states` contains all declared states except the master.

    Attributes:
        update: the update of the batch.
        group: the parameter group.
        formats: of the tensors in the batch.
        hyper: FP64 on the device, the group's `Update.numbers`.
        by_rows: whether all tensors are row-major, as the kernels require.
        The others: as in `msamp.kernels.reference.adamw.Batch`.
    """

    update: "Update"
    group: dict[str, Any]
    formats: Formats
    hyper: torch.Tensor
    by_rows: bool

    @property
    def rounding(self) -> Rounding:
        """The rounding modes of moments and masters."""
        moments, masters = (self.formats.get(name, "nearest") for name in ("moment_rounding", "master_rounding"))
        return rounding_of(moments, masters, known_formats.by_name(self.formats["v"]), self.group.get("betas", (0.0, 0.0))[1])


class StepInputs(NamedTuple):
    """The inputs that all batches of a step share.

    Attributes:
        amaxes: FP32 [master_row + 1 or more, parameters]: stored amaxes of gradient, `kept` and master, of whole tensors.
        kept: FP32 [master_row or more, pieces]: receives the new states' `stored_amaxes` at `batch.places`.
        coefficient: FP32 0-dim, the factor of the gradients; None: 1.
        usable: bool 0-dim, whether to take the step.
    """

    amaxes: torch.Tensor
    kept: torch.Tensor
    coefficient: torch.Tensor | None
    usable: torch.Tensor


@dataclass(frozen=True)
class Update(ABC):
    """An update rule.

    Attributes:
        name: its name in `StateFormats.update`.
        states: its states, in the order of checkpoints.
        kept: keys of the states whose stored amax it requires.
        in_fp32: name of the update that does the same with FP32 arithmetic, to measure rounding errors; None: this one, with FP32 states.
        whole: whether it requires whole parameters, and cannot update only some rows of one.
    """

    name: str
    states: tuple[State, ...]
    kept: tuple[str, ...] = ()
    in_fp32: str | None = None
    whole: bool = False
    decoupled_only = False  # no field, so that a subclass sets it: whether a decay that is part of the gradient is refused

    @property
    def master_row(self) -> int:
        """The master's row in the table of amaxes, the last one that the update reads."""
        return 1 + len(self.kept)

    def check_group(self, states: Formats, decoupled: bool) -> None:
        """Raise a ValueError for formats or a kind of weight decay that this update does not support. The base class rejects a format with
        group scales for a state in `kept`."""
        for state in self.states:
            fmt = state.format_beside(known_formats.FP32, states)
            if fmt is not None and fmt.group and state.key in self.kept:
                raise ValueError(
                    f"{state.format} is {fmt}, which has no scale per tensor, but update {self.name!r} requires one for {state.key}; "
                    f"choose one of {', '.join(map(str, known_formats.ALL))}"
                )

    def check_parameter(self, p: torch.Tensor) -> None:  # noqa: B027 - most updates accept every parameter
        """Raise a ValueError for a parameter that this update does not support."""

    def options(self) -> dict[str, Any]:
        """Return the hyperparameters of this update besides `lr` and `weight_decay`, with their defaults."""
        return {"betas": (0.9, 0.999), "eps": 1e-8}

    def check_numbers(self, group: Mapping[str, Any]) -> None:
        """Raise a ValueError naming a parameter group's hyperparameter that is out of range, and the range."""
        for name in ("lr", "weight_decay", "eps"):
            if name in group:
                check_range(name, float(group[name]) if name == "lr" else group[name], 0.0, math.inf)
        for i, beta in enumerate(group.get("betas", ())):
            check_range(f"betas[{i}]", beta, 0.0, 1.0)

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        """Return a parameter group's hyperparameters, which `run` gets on the device as `batch.hyper`."""
        return [float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]]

    def weight_bounds(self, hyper: torch.Tensor, amaxes: torch.Tensor) -> torch.Tensor:
        """Return upper bounds of the weights beside masters after a step, FP32 [n], from which their scales follow: `hyper` is FP64 on the
        device, `numbers` of the group, `amaxes` FP32 [master_row + 1 or more, n], as in `StepInputs`."""
        return 2.0 * amaxes[self.master_row]

    def stored_amaxes(self, batch: UpdateBatch) -> torch.Tensor:
        """Return the stored amaxes of the states in `kept` and of the masters, FP32 [len(kept) + 1, n]; 0 if no scale follows from one."""
        return stored_amaxes([batch.states[key] for key in self.kept], batch.masters, batch.weights, decoupled=batch.group["decoupled"])

    @abstractmethod
    def run(self, tables: Tables, batch: UpdateBatch, inputs: StepInputs) -> None:
        """Update everything in `batch`, or nothing if the step is not usable. If it never waits for the host, a CUDA graph can contain it.

        Args:
            tables: stores the kernels' tables of addresses.
            batch: the tensors.
            inputs: of the step; `inputs.kept` is changed in place.
        """
