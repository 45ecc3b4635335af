"""Group an optimizer's holdings into batches that one launch updates."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from msamp.numerics.tensor import PLAIN
from msamp.optim.kept_states import update_of
from msamp.optim.shard import Holding
from msamp.optim.states import as_stored, is_scaled, payload
from msamp.optim.updates import MASTER, Update, UpdateBatch

States = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]  # the states of each holding, by its weight


def update_batches(
    holdings: Sequence[Holding], states: States, hyper: Callable[[Mapping[str, Any], Update], torch.Tensor]
) -> Iterator[UpdateBatch]:
    """Yield batches of holdings that one launch can update: of the same group and formats, and all of them row-major or none.

    Args:
        holdings: with states; all or none have a gradient.
        states: the states by holding.
        hyper: parameter group and update -> `UpdateBatch.hyper`.
    """
    alike: dict[tuple[Any, ...], list[Holding]] = {}
    for holding in holdings:
        own = MASTER.key not in states[holding.weight]
        stored = _dtype(holding.grad), None if own else _dtype(holding.weight)
        kind = (id(holding.group), holding.weight.is_contiguous(), *stored, *holding.formats.values())
        alike.setdefault(kind, []).append(holding)
    for (_, by_rows, _, own_format, *_), members in alike.items():
        held = [states[holding.weight] for holding in members]
        weights, beside = [holding.weight for holding in members], own_format is not None
        group, formats, update = members[0].group, members[0].formats, update_of(members[0].formats)
        yield UpdateBatch(
            update=update,
            group=group,
            formats=formats,
            hyper=hyper(group, update),
            by_rows=by_rows,
            grads=[holding.grad for holding in members if holding.grad is not None],
            masters=[state[MASTER.key] for state in held] if beside else weights,
            weights=weights if beside else [],
            states={state.key: [as_stored(kept, state.key) for kept in held] for state in update.states if state != MASTER},
            steps=[state["step"] for state in held],
            indices=[holding.index for holding in members],
            places=[holding.place for holding in members],
            keys=[holding.key for holding in members],
            offsets=[holding.offset for holding in members],
        )


def _dtype(x: torch.Tensor | None) -> tuple[torch.dtype, bool] | None:
    """Return the dtype in which a tensor is stored and whether it has a scale; None for None."""
    if x is None:
        return None
    return (x.dtype, False) if type(x) in PLAIN else (payload(x).dtype, is_scaled(x))
