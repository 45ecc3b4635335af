"""Optimizer states that another optimizer has saved, in the formats of this one: torch's AdamW, Adam, SGD and Muon, and other recipes.

A moment is decoded to FP32 and stored in this optimizer's format, to nearest. A master that was not saved stays as it is, or starts from
the weight. COAT's payloads are no values: their entries have names of their own in a `state_dict` of one's own loop, so that torch's
optimizers, which would read `exp_avg` as it stands, stop at a missing key.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from msamp.kernels.reference.store import store_
from msamp.numerics.formats import Format
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.range_expand import quantize_expanded
from msamp.optim.kept_states import kept_states
from msamp.optim.states import MAX, as_stored, begun, by_key, make_master, own_values, parameter_names, without_rounding
from msamp.optim.updates import MASTER, Formats, State, formats_of, named_formats

_PACKED = "_coat"  # suffix of the key of a payload in groups
TURNED = "stored_transposed"  # attribute of a weight whose optimizer state of before the conversion has its rows as columns
_OWN_OPTIONS = ("params", "formats", "keys", "param_names", "decoupled")


def packed_names(state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The states of a `state_dict` with names for COAT's payloads that no other optimizer reads as values."""
    return {i: {key + _PACKED if key + MAX in own else key: x for key, x in own.items()} for i, own in state.items()}


def unpacked_names(state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The inverse of `packed_names`; states that were saved with the former names stay."""
    return {i: {key.removesuffix(_PACKED): x for key, x in own.items()} for i, own in state.items()}


def in_own_formats(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A `state_dict` of another optimizer or recipe as `optimizer` would have saved it; groups in its own formats stay as they are.

    Args:
        optimizer: of this library.
        state_dict: whole, with as many groups and parameters.

    Raises:
        ValueError: for a state that the optimizer needs and the other one does not keep, and for options without a low-precision form.
    """
    saved_groups, groups, names = state_dict["param_groups"], optimizer.param_groups, iter(parameter_names(optimizer))
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        return dict(state_dict)  # for its reader to refuse
    state, made = dict(state_dict["state"]), []
    # Levels with the same formats differ in whether the weight is its own master.
    keeps = any(state.copy for group in groups for p, own in _with_formats(group) for state, _ in kept_states(p, own))
    same_masters = not state or keeps == any(MASTER.key in own for own in state.values())
    for saved, group in zip(saved_groups, groups, strict=True):
        own_names = [next(names) for _ in group["params"]]
        theirs = None if saved.get("formats") is None else named_formats(saved["formats"], len(saved["params"]))
        if same_masters and without_rounding(theirs) == without_rounding(group["formats"]):
            made.append(saved)
            continue
        for option in ("amsgrad", "maximize"):
            if saved.get(option):
                raise ValueError(f"the states were saved with {option}=True, which has no low-precision form; start from the weights alone")
        options = {key: saved.get(key, value) for key, value in group.items() if key not in _OWN_OPTIONS}
        kept = {key: group[key] for key in _OWN_OPTIONS if key in group}
        decoupled = saved.get("decoupled", saved.get("decoupled_weight_decay", group["decoupled"]))
        made.append({**kept, **options, "decoupled": decoupled, "params": saved["params"]})
        for index, name, p, formats in zip(saved["params"], own_names, group["params"], formats_of(group), strict=True):
            if state.get(index):
                turned = theirs is None and getattr(p, TURNED, False)
                state[index] = _in_own_formats(name, p, kept_states(p, formats), state[index], optimizer.state.get(p, {}), turned)
    return {**state_dict, "state": state, "param_groups": made}


def _with_formats(group: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, Formats]]:
    return zip(group["params"], formats_of(group), strict=True)


def _in_own_formats(
    name: str, p: torch.Tensor, declared: Any, saved: Mapping[str, Any], present: Mapping[str, Any], turned: bool
) -> dict[str, torch.Tensor]:
    own: dict[str, torch.Tensor] = {"step": torch.as_tensor(saved.get("step", 1), dtype=torch.float32).reshape(()).clone()}
    for state, fmt in declared:
        if saved.get(state.key) is not None:
            values = own_values(as_stored(saved, state.key))  # type: ignore[arg-type]
            values = (values.t() if turned else values).contiguous().to(p.device)
            if values.shape != p.shape:
                raise ValueError(
                    f"{state.key} of {name} has shape {tuple(values.shape)}, its parameter {tuple(p.shape)}; load its own state"
                )
            own |= {state.key: make_master(p, fmt, values)} if state.copy else _encoded(state, fmt, values)
        elif state.copy:
            own[state.key] = present[state.key] if state.key in present else make_master(p, fmt)
        elif state.remainder_of is not None or state.key in saved:
            own |= begun(state.key, fmt, p)
        else:
            raise ValueError(
                f"the saved state of {name} has {', '.join(saved)}, and this optimizer needs {state.key}; load what an optimizer of its "
                "kind has saved, or start from the weights alone"
            )
    return own


def _encoded(state: State, fmt: Format, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """FP32 values as an update stores them to nearest."""
    if fmt.group:
        return by_key(state.key, quantize_expanded(values, fmt))
    made = begun(state.key, fmt, values)
    bounds = TENSORWISE.amax(values).reshape(1) if fmt.scaled else None
    store_([made[state.key]], [values], bounds, positive=state.non_negative and fmt.scaled)
    return made
