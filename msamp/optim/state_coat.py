"""COAT's optimizer states [COAT, part 1]: an FP8 payload, and a maximum and an exponent for each group of 128 of a row."""

from collections.abc import Mapping

import torch

from msamp.numerics.formats import Format
from msamp.numerics.range_expand import STATE_GROUP, Expanded

MAX, EXPONENT = "_max", "_k"  # what follows the state's name in the keys of its groups' numbers


class CoatFormat:
    """E4M3 or E5M2 with dynamic range expansion.

    The state `exp_avg` of a weight [.., n] is the payload in the weight's shape; `exp_avg_max` and `exp_avg_k`, FP32 [.., ceil(n / 128)],
    stand beside it. So rows of a weight have rows of all three.
    """

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def init(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=self.format.dtype, device=like.device)

    def beside(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        largest = torch.zeros(STATE_GROUP.groups(like.shape), device=like.device)
        return {MAX: largest, EXPONENT: torch.ones_like(largest)}


def by_key(key: str, x: torch.Tensor | Expanded) -> dict[str, torch.Tensor]:
    """The inverse of `as_stored`: what stands in the optimizer's state."""
    return {key: x.payload, key + MAX: x.max, key + EXPONENT: x.k} if isinstance(x, Expanded) else {key: x}


def as_stored(state: Mapping[str, torch.Tensor], key: str) -> torch.Tensor | Expanded:
    """A state with what stands beside it: what the update loads and stores."""
    return Expanded(state[key], state[key + MAX], state[key + EXPONENT]) if key + MAX in state else state[key]
