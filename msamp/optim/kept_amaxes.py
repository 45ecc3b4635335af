"""The amaxes of stored states and masters, from which the bounds of the next step's scales follow.

Each update returns the amaxes of what it writes. Tensors that something else wrote are measured again before the next step.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from msamp.kernels.tables import Tables
from msamp.optim.kept_states import update_of
from msamp.optim.masters import version_of
from msamp.optim.shard import Holding
from msamp.optim.update_batches import States
from msamp.optim.updates import MASTER, UpdateBatch

Batches = Callable[[Sequence[Holding]], Iterable[UpdateBatch]]


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
