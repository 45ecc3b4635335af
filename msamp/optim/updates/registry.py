"""The known updates by name, and what a parameter group takes of those that its formats name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from msamp.kernels.reference.collage import VARIANTS
from msamp.numerics.formats import Format
from msamp.numerics.recipe import StateFormats
from msamp.optim.updates.adamw import MOMENTS, AdamW
from msamp.optim.updates.collage import collage_update
from msamp.optim.updates.momentum import MOMENTUM, SGD, Muon
from msamp.optim.updates.update import MASTER, ROUNDING_FIELDS, WEIGHT, State, Update

_KNOWN: dict[str, Update] = {
    "fp32": AdamW("fp32", (MASTER, *MOMENTS), kept=("exp_avg", "exp_avg_sq")),
    "sgd": SGD("sgd", (MASTER,)),
    "sgd-momentum": SGD("sgd-momentum", (MASTER, MOMENTUM), kept=(MOMENTUM.key,)),
    "muon": Muon("muon", (MASTER, MOMENTUM), kept=(MOMENTUM.key,), whole=True),
    **{name: collage_update(name) for name, variant in VARIANTS.items() if variant.dtype is torch.bfloat16},
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
    problems = [f"{key} is declared twice" for key in sorted({key for key in keys if keys.count(key) > 1})]
    problems += ["step is the key of the number of steps, which every update has"] if "step" in keys else []
    problems += [f"{state.key}: a key takes no '/', '@' or '.'" for state in update.states if set(state.key) & set("/@.")]
    columns = [state.column for state in numbers]
    problems += [f"two states count in column {column}" for column in sorted({c for c in columns if columns.count(c) > 1})]
    problems += [problem for state in update.states for problem in _problems(state, keys)]
    problems += [f"it keeps the amax of {key}, which is not among the states" for key in update.kept if key not in keys]
    problems += [f"it keeps the amax of {MASTER.key}, which every update has: drop it"] if MASTER.key in update.kept else []
    if update.in_fp32 is not None:
        by_name(update.in_fp32)
    if problems:
        raise ValueError(f"update {update.name!r} cannot be registered: {'; '.join(problems)}")


def _problems(state: State, keys: Sequence[str]) -> Iterator[str]:
    """What is wrong with one state of an update with states of these keys."""
    legal = [f.name for f in fields(StateFormats) if f.name not in ("grad", "update", *ROUNDING_FIELDS)]
    if not isinstance(state.format, Format) and state.format not in legal:
        yield f"{state.key} has format {state.format!r}: give a Format, or one of {', '.join(legal)}"
    if state.copy and state != MASTER:
        yield f"{state.key} is a copy of the parameter: only {MASTER.key} is, declare updates.MASTER"
    if state.remainder_of not in (None, WEIGHT, *keys):
        yield f"{state.key} is the remainder of {state.remainder_of}, which is not among the states"
    elif state.remainder_of is not None and remainders().get(state.key, state.remainder_of) != state.remainder_of:
        yield f"{state.key} is the remainder of {remainders()[state.key]} in another update: choose another key"
