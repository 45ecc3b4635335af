"""`msamp.clip_grad_norm_`: clip plain and FP8 gradients together, on any number of processes."""

from collections.abc import Iterable

import torch

from msamp.integrations.loop_optimizer import optimizers_of
from msamp.optim.clip import clip_
from msamp.optim.shard import gradient


def clip_grad_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip gradients like `torch.nn.utils.clip_grad_norm_`, for plain and FP8 gradients together, on any number of processes.

    If the parameters' optimizer averages gradients over several processes, it clips the average, and the call is collective.

    For an FP8 gradient the coefficient is folded into its scale_inv, so no element is rounded again.

    Args:
        parameters: one or several.
        max_norm: above 0.
        norm_type: 2.

    Returns:
        The norm before clipping, FP64 0-dim, the same on all processes.

    Raises:
        ValueError: if `max_norm` is not positive, `norm_type` is not 2, or the parameters belong to optimizers with separate averages.
    """
    if norm_type != 2:
        raise ValueError(f"norm_type is {norm_type}; it must be 2: for others call optimizer.synchronize() and torch's clip_grad_norm_")
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    owners = optimizers_of(params)
    if len(owners) > 1 and any(owner.group is not None for owner in owners):
        raise ValueError(f"the parameters belong to {len(owners)} optimizers that average gradients separately; clip each one's separately")
    if len(owners) == 1:
        return owners[0].clip(params, max_norm)
    return clip_([g for g in map(gradient, params) if g is not None], max_norm)
