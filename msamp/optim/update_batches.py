"""Group an optimizer's holdings into batches that one launch updates, and keep the amaxes of what the updates have stored.

The scales of the next step follow from bounds, and the bounds from amaxes of stored states and masters. Each update returns the amaxes of
what it writes. Tensors that something else wrote are measured again before the next step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from msamp.kernels.tables import Tables
from msamp.numerics.tensor import PLAIN
from msamp.optim.masters import version_of
from msamp.optim.shard import Holding
from msamp.optim.states import as_stored, is_scaled, payload
from msamp.optim.updates import MASTER, Update, UpdateBatch, update_of

States = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]  # the states of each holding, by its weight
Batches = Callable[[Sequence[Holding]], Iterable[UpdateBatch]]


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


class KeptAmaxes:
    """A table of stored amaxes, with the versions of the tensors that were measured.

    Attributes:
        table: FP32 [rows, pieces]: columns by `Holding.place`, rows of the states in `Update.kept` and of the master. It keeps its memory,
            which CUDA graphs write to, unless the number of pieces or rows grows.
    """

    def __init__(self) -> None:
        self.table = torch.zeros(0, dtype=torch.float32, device="cpu")
        self._seen: dict[torch.Tensor, tuple[int, ...]] = {}

    def forget(self) -> None:
        """Measure everything again when it is needed next."""
        self._seen = {}

    def of(self, holdings: Sequence[Holding], states: States, batches: Batches, tables: Tables, rows: int) -> torch.Tensor:
        """Return the stored amaxes, FP32 [rows, holdings].

        Args:
            holdings: with states.
            states: the states by holding.
            batches: groups holdings into launches.
            tables: of the device.
            rows: the number of rows that the updates of all parameters require.
        """
        size = 1 + max((holding.place for holding in holdings), default=-1)
        if self.table.dim() != 2 or self.table.shape[0] != rows or self.table.shape[1] < size or self.table.device != tables.device:
            self.table, self._seen = torch.zeros(rows, size, device=tables.device, dtype=torch.float32), {}
        self.take(holdings, states, batches)
        return self.table.index_select(1, tables.send("places", [holding.place for holding in holdings]))

    def take(self, holdings: Sequence[Holding], states: States, batches: Batches) -> None:
        """Measure again the tensors that something else changed; do nothing before the first `of`."""
        if self.table.dim() != 2:
            return
        stale = [holding for holding in holdings if self._seen.get(holding.weight) != _signature(holding, states)]
        for batch in batches(stale):
            self.table[: batch.update.master_row, batch.places] = batch.update.stored_amaxes(batch)
        # So that a step captured next does not measure them too: the list of places above is copied from the host, which a capture refuses.
        self.written(stale, states)

    def written(self, holdings: Sequence[Holding], states: States) -> None:
        """Note the versions of holdings whose amaxes the table has, such as after an update, which has written its new ones there."""
        self._seen |= {holding.weight: _signature(holding, states) for holding in holdings}


def _signature(holding: Holding, states: States) -> tuple[int, ...]:
    """Return a signature that changes when other code changes a tensor with a stored amax."""
    state = states[holding.weight]
    kept = [state[key] for key in update_of(holding.formats).kept]
    return version_of(holding.param, *kept, state.get(MASTER.key, holding.param))
