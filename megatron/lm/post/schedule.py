"""Learning rate and rows of a step as functions of its number, so that a resumed run needs no other state."""

import math

import torch


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, low: float = 0.0) -> float:
    """Return the learning rate: linear from 0 over `warmup` steps, then a cosine from `peak` to `low` at the last of `steps`.

    Args:
        step: from 0.
        steps, warmup: of the run.
        peak, low: learning rates.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / max(1, steps - 1 - warmup)
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def drawn(step: int, count: int, rows: int, seed: int) -> list[int]:
    """Return the row indices of a step: `count` of `rows`, each once per epoch, shuffled in every epoch."""
    orders: dict[int, list[int]] = {}
    indices = []
    for place in range(step * count, (step + 1) * count):
        epoch, at = divmod(place, rows)
        if epoch not in orders:
            orders[epoch] = torch.randperm(rows, generator=generator(seed, epoch)).tolist()
        indices.append(orders[epoch][at])
    return indices


def generator(seed: int, number: int) -> torch.Generator:
    """Return a CPU generator for one epoch or step of a seed."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
