"""Adam's arithmetic, written once: FP32, in torch.optim.AdamW's own order of operations, so that FP32 states equal it bit for bit."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Hyper(NamedTuple):
    """Adam's numbers for one parameter group; `weight_decay` is decoupled (AdamW's)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def adam_(
    ps: list[torch.Tensor],
    ms: list[torch.Tensor],
    vs: list[torch.Tensor],
    gs: list[torch.Tensor],
    steps: Sequence[int],
    hyper: Hyper,
) -> None:
    """One step of AdamW on lists of tensors, in place.

    The parameters are updated from the moments as just computed, before those are rounded to what stores them
    (FP8-LM section 2.2).

    Args:
        ps, ms, vs, gs: parameters, first and second moments, gradients; FP32, equal shapes at equal places. `gs` is only read.
        steps: number of this step for each tensor, from 1.
        hyper: the group's numbers.
    """
    lr, beta1, beta2, eps, weight_decay = hyper
    if weight_decay:
        torch._foreach_mul_(ps, 1 - lr * weight_decay)
    torch._foreach_lerp_(ms, gs, 1 - beta1)
    torch._foreach_mul_(vs, beta2)
    torch._foreach_addcmul_(vs, gs, gs, 1 - beta2)
    denominators = list(torch._foreach_sqrt(vs))
    torch._foreach_div_(denominators, [(1 - beta2**step) ** 0.5 for step in steps])
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(ps, ms, denominators, [-(lr / (1 - beta1**step)) for step in steps])
