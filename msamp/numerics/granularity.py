"""Which elements of a tensor share one scale.

A granularity answers one question, the largest magnitude of each set of elements that shares a scale; everything else
(`scale_from_amax`, `quantize`, `dequantize`) works on any shape that broadcasts against the tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import pad


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


@dataclass(frozen=True)
class Group:
    """One scale for every `size` consecutive elements of a row (the last dimension): the 1 x G pieces of COAT's page.

    The last group of a row may be short. No group crosses a row, so a tensor cut along another dimension has the groups of the whole one.
    A 0-dim tensor is a row of one element.

    Attributes:
        size: elements of a group [COAT: 128 for optimizer states, 16 for the activations of non-linear layers].

    Raises:
        ValueError: `size` is less than 1.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a group of {self.size} elements holds nothing; give at least 1")

    def split(self, x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """[.., n] -> [.., groups, size] of the dtype of `x`, detached; short groups are filled up with `fill`."""
        rows = x.detach().reshape(x.shape or (1,))
        return pad(rows, (0, -rows.shape[-1] % self.size), value=fill).unflatten(-1, (self.groups(x.shape)[-1], self.size))

    def groups(self, shape: Sequence[int]) -> tuple[int, ...]:
        """How many there are: [.., n] -> [.., ceil(n / size)]."""
        *rows, columns = shape or (1,)
        return (*rows, -(-columns // self.size))

    def spread(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """[.., groups] -> `shape`: the value of its group at every element."""
        return values.repeat_interleave(self.size, -1)[..., : (shape or (1,))[-1]].reshape(tuple(shape))

    def maxima(self, x: torch.Tensor) -> torch.Tensor:
        """FP32 [.., groups]: the amax of each group, one value a group; +inf where it holds a NaN or an infinity."""
        amax = self.split(x).abs().amax(-1).float()
        return amax.masked_fill(amax.isnan(), float("inf"))

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        """`maxima` in the shape of `x`, FP32."""
        return self.spread(self.maxima(x), x.shape)

    def __str__(self) -> str:
        return f"group({self.size})"


TENSORWISE = Tensorwise()
