"""The amaxes of states and masters as they were last stored, from which the next step's scales are bounded.

Each update leaves those of what it writes. What somebody else has written since is read again before it is needed.
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
    """A table of amaxes as stored, and what they were taken of.

    Attributes:
        table: FP32 [rows, pieces], columns by `Holding.place`, rows of the states that an update keeps and of the master. The same memory
            from step to step, unless there are more pieces or rows: CUDA graphs write in it.
    """

    def __init__(self) -> None:
        self.table = torch.zeros(0, dtype=torch.float32)
        self._seen: dict[torch.Tensor, tuple[int, ...]] = {}

    def forget(self) -> None:
        """Read everything again when it is needed next."""
        self._seen = {}

    def of(self, holdings: Sequence[Holding], states: States, batches: Batches, tables: Tables, rows: int) -> torch.Tensor:
        """FP32 [rows, holdings]: the amaxes as stored.

        Args:
            holdings: with states.
            states: theirs.
            batches: groups holdings into launches.
            tables: of the device.
            rows: that the updates of all parameters take.
        """
        size = 1 + max((holding.place for holding in holdings), default=-1)
        if self.table.dim() != 2 or self.table.shape[0] != rows or self.table.shape[1] < size or self.table.device != tables.device:
            self.table, self._seen = torch.zeros(rows, size, device=tables.device, dtype=torch.float32), {}
        self.take(holdings, states, batches)
        return self.table.index_select(1, tables.send("places", [holding.place for holding in holdings]))

    def take(self, holdings: Sequence[Holding], states: States, batches: Batches) -> None:
        """Read again what somebody else has changed; nothing before the first `of`."""
        if self.table.dim() != 2:
            return
        stale = [holding for holding in holdings if self._seen.get(holding.weight) != _signature(holding, states)]
        for batch in batches(stale):
            self.table[: batch.update.master_row, batch.places] = batch.update.stored_amaxes(batch)

    def written(self, holdings: Sequence[Holding], states: States) -> None:
        """After an update, which has left the amaxes of what it wrote."""
        self._seen |= {holding.weight: _signature(holding, states) for holding in holdings}


def _signature(holding: Holding, states: States) -> tuple[int, ...]:
    """Changes when other code changes a tensor with a kept amax."""
    state = states[holding.weight]
    kept = [state[key] for key in update_of(holding.formats).kept]
    return version_of(holding.param, *kept, state.get(MASTER.key, holding.param))
