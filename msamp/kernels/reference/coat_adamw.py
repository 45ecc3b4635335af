"""AdamW with moments, one or both, of COAT's format: FP8 in groups with range expansion [COAT, part 1]. The arithmetic is `adamw`'s."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from msamp.kernels.reference.adamw import Batch, Hyper, update_
from msamp.kernels.reference.store import NEAREST, Rounding
from msamp.kernels.tables import Tables
from msamp.numerics.formats import of_dtype
from msamp.numerics.range_expand import Expanded, quantize_expanded


def coat_adamw(
    tables: Tables | None,
    batch: Batch,
    hyper: torch.Tensor,
    amaxes: torch.Tensor,
    kept: torch.Tensor,
    coefficient: torch.Tensor | None,
    usable: torch.Tensor,
    *,
    decoupled: bool,
    rounding: Rounding = NEAREST,
) -> None:
    """As `adamw`, with moments that are `Expanded`: load to FP32, update, and store with new maxima and exponents.

    These come from the new moments themselves, group by group, so that no bound is needed and rows of `kept` stay 0. A moment in
    another format is stored as `adamw` does.

    Args:
        batch: `ms` or `vs`, or both, hold `Expanded` moments.
        The others: as `adamw`.
    """
    if not bool(usable):
        return
    numbers = Hyper(*hyper.tolist()[:5])
    for part in batch.chunks():
        plain = replace(part, ms=_loaded(part.ms), vs=_loaded(part.vs))
        mine = amaxes[:, part.indices]
        update_(plain, numbers, mine, kept, coefficient, decoupled=decoupled, rounding=rounding, bounded=True)
        _store(part.ms, plain.ms)
        _store(part.vs, plain.vs)


def _loaded(states: Sequence[torch.Tensor | Expanded]) -> list[torch.Tensor | Expanded]:
    """Expanded states as FP32 tensors, others as they are."""
    return [state.dequantize() if isinstance(state, Expanded) else state for state in states]


def _store(states: Sequence[torch.Tensor | Expanded], values: Sequence[torch.Tensor | Expanded]) -> None:
    for state, value in zip(states, values, strict=True):
        if isinstance(state, Expanded) and isinstance(value, torch.Tensor):
            new = quantize_expanded(value, of_dtype(state.payload.dtype), state.group)
            for old, now in ((state.payload, new.payload), (state.max, new.max), (state.k, new.k)):
                old.copy_(now)
