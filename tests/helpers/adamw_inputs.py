"""The numbers and the batches that the tests of AdamW's kernels share."""

from typing import Any

import torch

from msamp.kernels.reference.adamw import Batch, Hyper, hyper_numbers

HYPER = {"lr": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def hyper(device: torch.device | str, **changed: float) -> torch.Tensor:
    """The learning rate, betas, eps and weight decay as the kernels take them, FP64, with the named ones changed."""
    return torch.tensor(hyper_numbers(Hyper(**{**HYPER, **changed})), dtype=torch.float64, device=device)


def adamw_batch(
    grads: list[torch.Tensor],
    ms: list[Any],
    vs: list[Any],
    masters: list[Any],
    *,
    step: float = 0.0,
    weight_remainders: list[torch.Tensor] | None = None,
    v_remainders: list[torch.Tensor] | None = None,
    **lists: Any,
) -> Batch:
    """Tensors that AdamW updates, at step `step` and in the order of their columns unless `lists` says otherwise."""
    beside = {"weight_remainder": weight_remainders, "exp_avg_sq_remainder": v_remainders}
    steps = [torch.tensor(step, device=g.device) for g in grads]
    order = {"weights": [], "steps": steps, "indices": list(range(len(grads))), "places": list(range(len(grads)))}
    states = {"exp_avg": ms, "exp_avg_sq": vs} | {key: column for key, column in beside.items() if column}
    return Batch(grads=grads, masters=masters, states=states, **(order | lists))
