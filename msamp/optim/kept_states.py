"""The states that an update keeps beside a parameter, by its formats: which, in which format, and the requirements on a saved one."""

from collections.abc import Iterator
from typing import Any

import torch

from msamp.numerics.formats import Format
from msamp.numerics.recipe import COLLAGE_FORMATS
from msamp.optim import updates
from msamp.optim.states import Expected, expected_moment, weight_format
from msamp.optim.updates import Formats, State, Update, format_names


def update_of(formats: Formats) -> Update:
    """The update that formats name."""
    return updates.by_name(formats["update"])


def kept_states(p: torch.Tensor, formats: Formats) -> Iterator[tuple[State, Format]]:
    """What the optimizer keeps beside a parameter with states in these formats, and in which format."""
    for state in update_of(formats).states:
        fmt = state.format_beside(weight_format(p), formats)
        if fmt is not None:
            yield state, fmt


def expected_states(p: torch.Tensor, formats: Formats, shape: torch.Size) -> dict[str, Expected]:
    """By key, what a saved state of a parameter, or of some of its rows in `shape`, has to be."""
    expected = {"step": Expected(torch.empty((), device="meta"), least=0.0)}
    for state, fmt in kept_states(p, formats):
        expected |= expected_moment(state.key, fmt, shape, non_negative=state.non_negative)
    return expected


def named_by_variant(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A `state_dict` of CollageAdamW, a former optimizer of this library, with formats where its groups name a variant; any other as it is.

    Raises:
        ValueError: for options that no update has.
    """
    if all("formats" in group or "variant" not in group for group in state_dict["param_groups"]):
        return state_dict
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        if group.pop("weight_sum") != "fast-two-sum" or group.pop("eps_inside_root"):
            raise ValueError("the states were saved with weight_sum or eps_inside_root, which no update has; start from the weights alone")
        group |= {"formats": format_names(COLLAGE_FORMATS[group.pop("variant")]), "decoupled": True}
    return {**state_dict, "param_groups": groups}
