"""The states that the optimizer stores for a parameter, their formats, and the requirements on saved ones."""

from collections.abc import Iterator

import torch

from msamp.numerics.formats import Format
from msamp.optim import updates
from msamp.optim.states import Expected, expected_moment, weight_format
from msamp.optim.updates import Formats, State, Update


def update_of(formats: Formats) -> Update:
    """Return the update that the formats name."""
    return updates.by_name(formats["update"])


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
