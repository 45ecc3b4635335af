"""Which elements of a tensor share one scale.

A granularity answers one question, the largest magnitude of each set of elements that shares a scale; everything else
(`scale_from_amax`, `quantize`, `dequantize`) works on any shape that broadcasts against the tensor.
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class Granularity(Protocol):
    """The seam for other ways to share scales: rows, blocks, groups."""

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        """FP32 amax of each set, in a shape that broadcasts against `x`; +inf where the set holds a NaN or an infinity."""


class Tensorwise:
    """One scale for a whole tensor (FP8-LM appendix A.2)."""

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        """FP32 scalar (0-dim) amax of `x`: 0 for an empty tensor, +inf where `x` holds a NaN or an infinity.

        NaN becomes +inf because a maximum that drops NaN (Triton's, gloo's) and one that keeps it (torch's) must agree.
        """
        if x.numel() == 0:
            return torch.zeros((), dtype=torch.float32, device=x.device)
        low, high = torch.aminmax(x.detach())  # one pass and no copy of |x|; 20 times faster than a vector norm on a CPU
        amax = torch.maximum(-low, high).float()
        return amax.masked_fill(amax.isnan(), float("inf"))

    def amaxes(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """FP32 [len(xs)]: `amax` of each of several tensors on one device; on a GPU in a few launches for all of them."""
        if not xs:
            return torch.zeros(0)
        if not xs[0].is_cuda:
            return torch.stack([self.amax(x) for x in xs])
        filled = [x.detach() if x.numel() else x.new_zeros(1) for x in xs]  # an empty tensor has no infinity norm
        amax = torch.stack([norm.float() for norm in torch._foreach_norm(filled, float("inf"))])
        return amax.masked_fill(amax.isnan(), float("inf"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensorwise)

    def __hash__(self) -> int:
        return hash(Tensorwise)

    def __repr__(self) -> str:
        return "tensorwise"


TENSORWISE = Tensorwise()
