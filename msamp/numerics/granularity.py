"""Granularities: which elements of a tensor share one scale.

A granularity divides a tensor into sets of elements that share a scale. It defines the amax of each set (`maxima`), the shape of one value
per set (`scales_shape`), and how to expand one value per set to one per element (`spread`). Everything else (`scale_from_amax`, `quantize`,
`dequantize`) works on any shape that broadcasts against the tensor. An operand is cast by

    scale = rule(granularity.maxima(x));  payload = quantize(x, granularity.spread(scale, x.shape), fmt)

and read back by `dequantize(payload, granularity.spread(scale_inv, x.shape))`. `msamp.numerics.block_scale` defines how block recipes turn
maxima into scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import pad


class Granularity(Protocol):
    """The interface of a granularity: one scale per tensor, row, block or group."""

    def maxima(self, x: torch.Tensor) -> torch.Tensor:
        """FP32 of shape `scales_shape(x.shape)`: the amax of each set; +inf where a set contains NaN or infinity."""

    def spread(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Expand one value per set, of shape `scales_shape(shape)`, to a shape that broadcasts against `shape`."""

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one value per set, for a tensor of `shape`."""


class Tensorwise:
    """One scale for a whole tensor (FP8-LM appendix A.2)."""

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        """FP32 scalar (0-dim) amax of `x`: 0 for an empty tensor, +inf if `x` contains NaN or infinity.

        NaN becomes +inf so that maxima that drop NaN (Triton's, gloo's) agree with those that propagate it (torch's).
        """
        if x.numel() == 0:
            return torch.zeros((), dtype=torch.float32, device=x.device)
        low, high = torch.aminmax(x.detach())  # one pass without a copy of |x|; 20 times faster than a vector norm on a CPU
        return torch.maximum(-low, high).float().nan_to_num_(float("inf"), float("inf"))

    def maxima(self, x: torch.Tensor) -> torch.Tensor:
        """`amax`: the whole tensor is one set."""
        return self.amax(x)

    def spread(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The value itself, which broadcasts against any shape."""
        return values

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """(): a 0-dim tensor."""
        return ()

    def amaxes(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """FP32 [len(xs)]: `amax` of several tensors on one device; on a GPU a few launches serve all of them."""
        if not xs:
            return torch.zeros(0, dtype=torch.float32, device="cpu")
        if not xs[0].is_cuda:
            return torch.stack([self.amax(x) for x in xs])
        filled = [x.detach() if x.numel() else x.new_zeros(1) for x in xs]  # an empty tensor has no infinity norm
        norms = torch._foreach_norm(filled, float("inf"))
        alike = len({norm.dtype for norm in norms}) == 1  # then convert them together: each conversion is a launch
        amax = torch.stack(norms).float() if alike else torch.stack([norm.float() for norm in norms])
        return amax.masked_fill(amax.isnan(), float("inf"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensorwise)

    def __hash__(self) -> int:
        return hash(Tensorwise)

    def __repr__(self) -> str:
        return "tensorwise"


@dataclass(frozen=True)
class Group:
    """One scale per `size` consecutive elements of a row (the last dimension): COAT's 1 x G groups.

    The last group of a row may be short. No group spans two rows, so cutting a tensor along another dimension does not change its groups.
    A 0-dim tensor is a row of one element.

    Attributes:
        size: elements per group [COAT: 128 for optimizer states, 16 for the activations of non-linear layers].

    Raises:
        ValueError: if `size` is less than 1.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"group size is {self.size}; it must be at least 1")

    def split(self, x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """[.., n] -> [.., groups, size] of the dtype of `x`, detached; short groups are right-padded with `fill`."""
        rows = x.detach().reshape(x.shape or (1,))
        return pad(rows, (0, -rows.shape[-1] % self.size), value=fill).unflatten(-1, (self.scales_shape(x.shape)[-1], self.size))

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The groups, one scale each: [.., n] -> [.., ceil(n / size)]."""
        *rows, columns = shape or (1,)
        return (*rows, -(-columns // self.size))

    def spread(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """[.., groups] -> `shape`: every element gets the value of its group."""
        return values.repeat_interleave(self.size, -1)[..., : (shape or (1,))[-1]].reshape(tuple(shape))

    def maxima(self, x: torch.Tensor) -> torch.Tensor:
        """FP32 [.., groups]: the amax of each group; +inf where a group contains NaN or infinity."""
        amax = self.split(x).abs().amax(-1).float()
        return amax.masked_fill(amax.isnan(), float("inf"))

    def __str__(self) -> str:
        return f"group({self.size})"


@dataclass(frozen=True)
class Block:
    """One scale per `rows` x `columns` block of a matrix (the last two dimensions); `Block(1, n)` has the sets of `Group(n)`.

    Blocks at the edge of a matrix may be short. Cutting a matrix between rows does not change its blocks if the cut is at a multiple of
    `rows`. A tensor of one dimension is one row; a 0-dim one is a row of one element.

    Attributes:
        rows: rows per block [DeepSeek-V3, section 3.3.2: 1 for activations and gradients, 128 for weights; OCP MX v1.0: 1].
        columns: columns per block, along the dimension that the GEMM sums over [DeepSeek-V3: 128; OCP MX v1.0: 32].

    Raises:
        ValueError: if `rows` or `columns` is less than 1.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"block size is {self.rows} x {self.columns}; it must be at least 1 x 1")

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """[.., M, N] -> [.., ceil(M / rows), ceil(N / columns)]; [N] -> [ceil(N / columns)]."""
        if len(shape) < 2:
            return (-(-(shape or (1,))[0] // self.columns),)
        *batch, rows, columns = shape
        return (*batch, -(-rows // self.rows), -(-columns // self.columns))

    def maxima(self, x: torch.Tensor) -> torch.Tensor:
        """FP32 [.., ceil(M / rows), ceil(N / columns)]: the amax of each block; +inf where a block contains NaN or infinity."""
        shape = self.scales_shape(x.shape)
        magnitude = x.detach().abs().reshape(*x.shape[:-2], *((1,) * (2 - x.ndim)), *x.shape[-2:])
        rows, columns = magnitude.shape[-2:]
        full = pad(magnitude, (0, -columns % self.columns, 0, -rows % self.rows)) if magnitude.numel() else magnitude.new_zeros(0)
        blocks = full.reshape(*x.shape[:-2], -(-rows // self.rows), self.rows, -(-columns // self.columns), self.columns)
        amax = blocks.amax((-3, -1)).float().reshape(shape)
        return amax.masked_fill(amax.isnan(), float("inf"))

    def spread(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """[.., ceil(M / rows), ceil(N / columns)] -> `shape`: every element gets the value of its block."""
        spread = values.repeat_interleave(self.columns, -1)[..., : (shape or (1,))[-1]]
        if len(shape) > 1:
            spread = spread.repeat_interleave(self.rows, -2)[..., : shape[-2], :]
        return spread.reshape(tuple(shape))

    def __str__(self) -> str:
        return f"block({self.rows} x {self.columns})"


TENSORWISE = Tensorwise()
