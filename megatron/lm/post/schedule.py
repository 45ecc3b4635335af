"""What a step takes, as a function of its number alone, so that a resumed run needs nothing of the one before."""

import math

import torch


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, low: float = 0.0) -> float:
    """Linear from 0 over `warmup` steps, then a cosine from `peak` to `low` at the last of `steps`.

    Args:
        step: from 0.
        steps, warmup: of the run.
        peak, low: rates.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / max(1, steps - 1 - warmup)
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def drawn(step: int, count: int, rows: int, seed: int) -> list[int]:
    """The rows of a step: `count` of `rows`, each once an epoch, in an order of its own every epoch."""
    orders: dict[int, list[int]] = {}
    found = []
    for place in range(step * count, (step + 1) * count):
        epoch, at = divmod(place, rows)
        if epoch not in orders:
            orders[epoch] = torch.randperm(rows, generator=generator(seed, epoch)).tolist()
        found.append(orders[epoch][at])
    return found


def generator(seed: int, number: int) -> torch.Generator:
    """A generator on the CPU for one epoch, or one step, of a seed."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
