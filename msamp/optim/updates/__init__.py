"""The optimizer's update rules. Each declares its states, the arguments that it rejects, and how it runs on a batch of tensors.

The optimizer, `update_error`, ZeRO, checkpoints, the memory planner and reports read these declarations and name no state themselves. So a
new update rule is one object, which can be in a user's own file:

    class Momentum(Update):
        def run(self, tables, batch, inputs): ...

    updates.register(Momentum("momentum", (MASTER, State("momentum_buffer", "m", "momentum")), kept=("momentum_buffer",)))
    optimizer = LowPrecisionOptimizer(params, formats=StateFormats(m=E4M3, update="momentum"))

Every process must register it before it builds an optimizer.

A state is a tensor with the shape of its parameter. If ZeRO splits a parameter into rows, the state is split into the same rows, with the
group maxima and exponents of a format (COAT). The step count, FP32 0-dim under the key `step`, belongs to every update and is not declared.

**Scales.** A scaled state is stored in one pass, so its scale must be known before its values. It follows from a bound, and the bound from
the amax of the stored state over the whole parameter. An update lists the states whose amax it requires in `kept`. The optimizer remembers
these amaxes, combines them over ranks, and passes them to `run` as rows of one table: row 0 is the gradient's (`GRAD`), then the rows of
`kept` in order, then the master's.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from msamp.kernels.reference.collage import VARIANTS
from msamp.numerics.formats import Format
from msamp.optim.states import Expected, expected_moment, weight_format
from msamp.optim.updates.adamw import MOMENTS, AdamW, collage_update
from msamp.optim.updates.momentum import MOMENTUM, SGD, Muon
from msamp.optim.updates.update import (
    MASTER,
    WEIGHT,
    Formats,
    State,
    StepInputs,
    Update,
    UpdateBatch,
    format_names,
    formats_of,
    named_formats,
)

__all__ = [
    "MASTER", "WEIGHT", "Formats", "State", "StepInputs", "Update", "UpdateBatch", "by_name", "check_options", "expected_states",
    "format_names", "formats_of", "kept_states", "named_formats", "own_keys", "register", "remainders", "take_options", "update_of",
    "updates_of",
]  # fmt: skip

UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "capturable")  # options of torch's optimizers
_KNOWN: dict[str, Update] = {
    "fp32": AdamW("fp32", (MASTER, *MOMENTS), kept=("exp_avg", "exp_avg_sq")),
    "sgd": SGD("sgd", (MASTER,)),
    "sgd-momentum": SGD("sgd-momentum", (MASTER, MOMENTUM), kept=(MOMENTUM.key,)),
    "muon": Muon("muon", (MASTER, MOMENTUM), kept=(MOMENTUM.key,), whole=True),
    **{name: collage_update(name) for name, variant in VARIANTS.items() if variant.dtype is torch.bfloat16},
}


def by_name(name: str) -> Update:
    """Return the update that `StateFormats.update` names.

    Raises:
        ValueError: if the name is unknown; lists the known names.
    """
    if name not in _KNOWN:
        raise ValueError(f"update {name!r} is unknown; choose one of {', '.join(_KNOWN)}, or register it (msamp.optim.updates.register)")
    return _KNOWN[name]


def update_of(formats: Formats) -> Update:
    """Return the update that the formats name."""
    return by_name(formats["update"])


def kept_states(p: torch.Tensor, formats: Formats) -> Iterator[tuple[State, Format]]:
    """Yield the states that the optimizer stores for a parameter, with their formats."""
    for state in update_of(formats).states:
        fmt = state.format_beside(weight_format(p), formats)
        if fmt is not None:
            yield state, fmt


def expected_states(p: torch.Tensor, formats: Formats, shape: torch.Size) -> dict[str, Expected]:
    """Return the requirements on the saved states of a parameter, or of its rows in `shape`, by key."""
    expected = {"step": Expected(torch.empty((), device="meta", dtype=torch.float32), least=0.0)}
    for state, fmt in kept_states(p, formats):
        expected |= expected_moment(state.key, fmt, shape, non_negative=state.non_negative)
    return expected


def updates_of(group: Mapping[str, Any]) -> list[Update]:
    """Return the updates of a parameter group, without duplicates."""
    given = group["formats"]
    return [by_name(name) for name in dict.fromkeys(formats["update"] for formats in (given if isinstance(given, list) else [given]))]


def check_options(group: Mapping[str, Any]) -> None:
    """Raise a ValueError if a parameter group sets an option of torch's optimizers, or a kind of decay, that its updates would ignore."""
    for option in UNSUPPORTED:
        if group.get(option):
            raise ValueError(f"optimizer option {option}=True is not available in low precision; leave it out, and load no states with it")
    decoupled = group.get("decoupled", True)
    if "decoupled" in group and group.get("decoupled_weight_decay", decoupled) != decoupled:
        raise ValueError(f"decoupled_weight_decay is {not decoupled}, but decoupled, which this optimizer reads, is not; set decoupled")
    for update in updates_of(group) if group.get("weight_decay") and not decoupled else ():
        if update.decoupled_only:
            raise ValueError(f"decoupled is False; update {update.name!r} only supports decoupled decay: leave it True, or use update fp32")


def take_options(param_group: dict[str, Any], defaults: Mapping[str, Any]) -> set[str]:
    """Add the missing options of its updates to a new parameter group: the optimizer's defaults if its update has the same options,
    otherwise the update's own defaults.

    Returns:
        The options in the optimizer's defaults that no update of the group accepts.

    Raises:
        ValueError: if a number is out of range, or the group has an option that none of its updates accepts.
    """
    check_options({**defaults, **param_group})
    own = by_name(defaults["formats"].update)
    chosen, usual = updates_of(param_group) or [own], own.options().keys()  # a group without parameters has no update
    foreign = usual - {name for update in chosen for name in update.options()}
    if foreign & param_group.keys():
        names, given = ", ".join(update.name for update in chosen), ", ".join(sorted(foreign & param_group.keys()))
        raise ValueError(f"a parameter group with update {names} has {given}, which this update does not accept; remove it")
    for update in chosen:
        for name, default in update.options().items():
            param_group.setdefault(name, defaults[name] if update.options().keys() == usual else default)
        update.check_numbers({**defaults, **param_group})
    return foreign


def register(update: Update) -> Update:
    """Register an update under its name in this process, and return it. Registering an equal update again has no effect.

    Raises:
        ValueError: if another update has that name.
    """
    if _KNOWN.get(update.name, update) != update:
        raise ValueError(f"another update is registered as {update.name!r}; choose a name other than {', '.join(_KNOWN)}")
    return _KNOWN.setdefault(update.name, update)


def own_keys() -> set[str]:
    """Return the state keys of all known updates, without masters and remainders, which depend on the weight."""
    return {state.key for update in _KNOWN.values() for state in update.states if state.remainder_of is None and not state.copy}


def remainders() -> dict[str, str]:
    """Map the key of each second component of a pair, in any known update, to the key of its first, or `WEIGHT`."""
    return {state.key: state.remainder_of for update in _KNOWN.values() for state in update.states if state.remainder_of is not None}
