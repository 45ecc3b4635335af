"""The states that an update keeps beside a parameter, by its formats: which, in which format, and the requirements on a saved one."""

from collections.abc import Iterator

import torch

from msamp.numerics.formats import Format
from msamp.optim import updates
from msamp.optim.states import Expected, expected_moment, weight_format
from msamp.optim.updates import Formats, State, Update


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
    expected = {"step": Expected(torch.empty((), device="meta", dtype=torch.float32), least=0.0)}
    for state, fmt in kept_states(p, formats):
        expected |= expected_moment(state.key, fmt, shape, non_negative=state.non_negative)
    return expected
