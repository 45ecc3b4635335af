"""Convert optimizer states that another optimizer saved to this optimizer's formats.

The other optimizer is torch's AdamW, Adam, SGD or Muon, one of another recipe, MS-AMP's, or an 8-bit AdamW of torchao or bitsandbytes.

A moment is dequantized to FP32 and rounded to nearest in this optimizer's format. A master that was not saved keeps its values, or is
initialized from the weight. COAT's payloads are not plain values, so a user loop's `state_dict` stores them under separate keys:
torch's optimizers, which would read `exp_avg` as values, then fail with a missing key.
"""

from collections.abc import Mapping
from typing import Any

import torch

from msamp.kernels.reference.store import store_
from msamp.numerics.foreign_tensors import plain_states
from msamp.numerics.formats import Format
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.lost_writes import warn_if_bits_are_lost
from msamp.numerics.range_expand import quantize_expanded
from msamp.numerics.tensor import fp32_values
from msamp.optim.states import MAX, as_stored, begun, by_key, local, make_master, own_values, parameter_names, without_rounding
from msamp.optim.updates import MASTER, State, check_options, formats_of, kept_states, named_formats

_PACKED = "_coat"  # key suffix of a payload with group scales
TURNED = "stored_transposed"  # attribute of a weight whose optimizer states from before the conversion are transposed
_OWN_OPTIONS = ("params", "formats", "keys", "param_names", "decoupled")


def packed_names(state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rename COAT's payloads in the states of a `state_dict`, so that no other optimizer reads them as values."""
    return {i: {key + _PACKED if key + MAX in own else key: x for key, x in own.items()} for i, own in state.items()}


def unpacked_names(state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Invert `packed_names`; states that were saved under the former names are unchanged."""
    return {i: {key.removesuffix(_PACKED): x for key, x in own.items()} for i, own in state.items()}


def in_own_formats(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a `state_dict` of another optimizer or recipe to what `optimizer` would have saved; groups in its own formats are unchanged.

    Args:
        optimizer: of this library.
        state_dict: complete, with the same number of groups and parameters.

    Raises:
        ValueError: if a state that the optimizer requires was not saved, or an option has no low-precision implementation.
    """
    saved_groups, groups, names = state_dict["param_groups"], optimizer.param_groups, iter(parameter_names(optimizer))
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        return dict(state_dict)  # `load_state_dict` will reject it
    state, converted = dict(state_dict["state"]), []
    # Recipes with the same state formats, and a model before and after bfloat16(), differ in whether a weight is its own master.
    pairs = [pair for group in groups for pair in zip(group["params"], formats_of(group), strict=True)]
    theirs_by_pair = (state.get(index) for saved in saved_groups for index in saved["params"])
    members = [(own, kept_states(*pair)) for own, pair in zip(theirs_by_pair, pairs, strict=True) if own]
    same_masters = all((MASTER.key in own) == any(declared.copy for declared, _ in kept) for own, kept in members)
    for saved, group in zip(saved_groups, groups, strict=True):
        own_names = [next(names) for _ in group["params"]]
        theirs = None if saved.get("formats") is None else named_formats(saved["formats"], len(saved["params"]))
        if same_masters and without_rounding(theirs) == without_rounding(group["formats"]):
            converted.append(saved)
            continue
        check_options({option: saved.get(option) for option in ("amsgrad", "maximize")})
        options = {key: saved.get(key, value) for key, value in group.items() if key not in _OWN_OPTIONS}
        kept = {key: group[key] for key in _OWN_OPTIONS if key in group}
        decoupled = saved.get("decoupled", saved.get("decoupled_weight_decay", group["decoupled"]))
        converted.append({**kept, **options, "decoupled": decoupled, "params": saved["params"]})
        for index, name, p, formats in zip(saved["params"], own_names, group["params"], formats_of(group), strict=True):
            if state.get(index):
                turned = theirs is None and getattr(p, TURNED, False)
                values = plain_states(name, state[index], p.t().shape if turned else p.shape) if theirs is None else state[index]
                state[index] = _in_own_formats(name, p, kept_states(p, formats), values, optimizer.state.get(p, {}), turned)
    return {**state_dict, "state": state, "param_groups": converted}


def _in_own_formats(
    name: str, p: torch.Tensor, declared: Any, saved: Mapping[str, Any], present: Mapping[str, Any], turned: bool
) -> dict[str, torch.Tensor]:
    step = saved.get("step", 1)
    step = step.float() if isinstance(step, torch.Tensor) else torch.tensor(step, dtype=torch.float32, device="cpu")
    own: dict[str, torch.Tensor] = {"step": step.reshape(()).clone()}
    for state, fmt in declared:
        if saved.get(state.key) is not None:
            values = own_values(as_stored(saved, state.key))  # type: ignore[arg-type]
            values = (values.t() if turned else values).contiguous().to(p.device)
            if values.shape != p.shape:
                raise ValueError(
                    f"{state.key} of {name} has shape {tuple(values.shape)}, but its parameter has {tuple(p.shape)}; load its own state"
                )
            own |= {state.key: make_master(p, fmt, values)} if state.copy else _encoded(state, fmt, values)
        elif state.copy:
            if local(p) is not p:
                raise ValueError(
                    f"the saved state of {name} has no {state.key}, and a rank of FSDP2 has no whole weight to initialize it from; load it "
                    "on one process with msamp.initialize and load here what that process saves, or start from the weights alone"
                )
            own[state.key] = present[state.key] if state.key in present else make_master(p, fmt)
        elif state.remainder_of is not None or state.key in saved:
            own |= begun(state.key, fmt, p)
        else:
            raise ValueError(
                f"the saved state of {name} has {', '.join(saved)}, but this optimizer requires {state.key}; load a state that the same "
                "kind of optimizer saved, or start from the weights alone"
            )
    if MASTER.key in saved and MASTER.key not in own and local(p) is p:
        error = (own_values(saved[MASTER.key]).to(p.device) - fp32_values(p)).abs().mean()
        warn_if_bits_are_lost(error > 2.0**-10 * fp32_values(p).abs().mean())
    return own


def _encoded(state: State, fmt: Format, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Store FP32 values as an update does, rounded to nearest."""
    if fmt.group:
        return by_key(state.key, quantize_expanded(values, fmt))
    tensors = begun(state.key, fmt, values)
    bounds = TENSORWISE.amax(values).reshape(1) if fmt.scaled else None
    store_([tensors[state.key]], [values], bounds, positive=state.non_negative and fmt.scaled)
    return tensors
