"""One scale for all ranks: the minimum of their own (FP8-LM section 2.1, equation 4).

A slot also tells what no scale can: -1 is a gradient that is not finite, +inf is no gradient at all. MIN lets the first
win over every scale and the second lose to it; a NaN would be dropped by MIN over gloo.
"""

from collections.abc import Sequence

import torch

from msamp.kernels import ops
from msamp.kernels.tables import Tables
from msamp.numerics.formats import Format

NOT_FINITE, ABSENT = -1.0, float("inf")
_UNBOUNDED = 2.0**126  # an all-zero gradient asks for nothing: the other ranks' scale holds


def local_slots(
    gradients: Sequence[torch.Tensor | None], fmt: Format, device: torch.device, tables: Tables | None = None, plain: bool = False
) -> torch.Tensor:
    """FP32 [n]: this rank's scale of each gradient by its own amax, or NOT_FINITE, or ABSENT; 1 for a format without scales.

    `plain`: gradients without scales are read too, to see those that are not finite.
    """
    present = [g for g in gradients if g is not None]
    if present and (fmt.scaled or plain):
        amaxes = ops.grad_stats(tables or Tables(device), [g.contiguous() for g in present], squares=False)[0][0]
        scales = ops.scale_from_amax(amaxes, fmt.max, None, _UNBOUNDED) if fmt.scaled else torch.ones_like(amaxes)
        scales = torch.where(amaxes < float("inf"), scales, NOT_FINITE)
    else:
        scales = torch.ones(len(present), device=device)
    if len(present) == len(gradients):
        return scales
    slots = torch.full((len(gradients),), ABSENT, device=device)
    slots[[i for i, g in enumerate(gradients) if g is not None]] = scales
    return slots


def usable(slots: torch.Tensor) -> torch.Tensor:
    """The slots with 1 where they hold no scale."""
    return slots.abs().nan_to_num(posinf=1.0)  # two launches a bucket: |NOT_FINITE| is 1 already
