"""AdamW with one or both moments in COAT's format, FP8 groups with range expansion [COAT, part 1]. The arithmetic is `adamw`'s."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from msamp.kernels.reference.adamw import Batch, Hyper, update_
from msamp.kernels.reference.store import NEAREST, Rounding, fallen
from msamp.kernels.tables import Tables
from msamp.numerics.formats import of_dtype
from msamp.numerics.range_expand import Expanded, quantize_expanded
from msamp.numerics.tensor import fp32_values


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
    """Run `adamw` with `Expanded` moments: load them to FP32, update, and store them with new maxima and exponents.

    Maxima and exponents are measured on the new moments, group by group, so no bound is needed and their rows of `kept` stay 0. A moment in
    another format is stored as in `adamw`.

    Args:
        batch: `ms` or `vs`, or both, are `Expanded`.
        The others: as for `adamw`.
    """
    if not bool(usable):
        return
    numbers = Hyper(*hyper.tolist()[:5])
    for part in batch.chunks():
        plain = replace(
            part, states={key: [x.dequantize() if isinstance(x, Expanded) else x for x in xs] for key, xs in part.states.items()}
        )
        own, decays = amaxes[:, part.indices], numbers.weight_decay and not decoupled
        no_gradient = [  # nor a decay
            (fp32_values(g) == 0) & (fp32_values(p) == 0) if decays else fp32_values(g) == 0
            for g, p in zip(part.grads, part.masters, strict=True)
        ]
        update_(plain, numbers, own, kept, coefficient, decoupled=decoupled, rounding=rounding, bounded=True)
        _store(part.ms, plain.ms, no_gradient, numbers.beta1)
        _store(part.vs, plain.vs)


def _store(
    states: Sequence[torch.Tensor | Expanded],
    values: Sequence[torch.Tensor | Expanded],
    no_gradient: Sequence[torch.Tensor] | None = None,
    beta1: float = 0.0,
) -> None:
    """Overwrite `Expanded` states. Where `no_gradient`, codes of m decrease if they would undo more than half of its decay."""
    for i, (state, value) in enumerate(zip(states, values, strict=True)):
        if isinstance(state, Expanded) and isinstance(value, torch.Tensor):
            fmt = of_dtype(state.payload.dtype)
            new = quantize_expanded(value, fmt, state.group)
            payload = new.payload
            if no_gradient is not None:
                # A code's value changes with the group's maximum and exponent, so m may decrease although its code stays.
                largest, k = (state.group.spread(x.double(), value.shape) for x in (new.max, new.k))
                payload = fallen(payload, fmt.max * (state.dequantize().abs() * beta1**0.5 / largest) ** k, no_gradient[i])
            for old, now in ((state.payload, payload), (state.max, new.max), (state.k, new.k)):
                old.copy_(now)
