"""How the input of a non-linear layer (norm, GELU, SwiGLU) is kept for backward: as it is, or in FP8 as COAT does.

Forward computes with the input itself; only the copy for backward is rounded. This file does not keep the inputs of linear layers: a fused
block makes them again from what is kept here, and another layer keeps them in FP8 with one scale a tensor. Made again from groups of 16
they are rounded twice, which takes about 1 dB of the 24 dB that a weight's gradient has (`tools/reproduce/coat_activations.py`); COAT keeps
them, which in a fused block would take 6 bytes a token and channel of a GPT, all that the groups save.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from msamp.kernels import ops
from msamp.numerics.formats import E4M3, Format

Parts = Sequence[torch.Tensor]


class Saved(Protocol):
    """The seam for other ways to keep an activation."""

    def element_bytes(self, wide: int) -> float:
        """Bytes that an element takes as it is kept, for a tensor of `wide` bytes an element."""

    def keep(self, x: torch.Tensor) -> Parts:
        """The tensors for `save_for_backward` in place of `x` [M, N], BF16, FP16 or FP32; their number never changes."""

    def restore(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """[M, N] of `dtype`, that of `x`, from the tensors of `keep`."""


class SavedBytes(NamedTuple):
    """What a fused block keeps for backward, in bytes per token: for its norm, but for the statistics (8 bytes), and for the rest."""

    norm: float
    inner: float


@dataclass(frozen=True)
class AsItIs:
    """The tensor itself."""

    def element_bytes(self, wide: int) -> float:
        """`wide`."""
        return wide

    def keep(self, x: torch.Tensor) -> Parts:
        """(x,)"""
        return (x,)

    def restore(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """x"""
        return parts[0]


@dataclass(frozen=True)
class GroupedFP8:
    """FP8 with a power-of-two scale_inv, as one exponent byte, for every `size` neighbours (COAT: mixed granularity).

    Attributes:
        format: E4M3 or E5M2.
        size: elements of a group, a power of two; COAT's paper takes 16.
        axis: along which they are neighbours: 1, the channels of a token; 0, the tokens of a channel, which COAT's page finds to cost
            accuracy at a norm's input.

    Raises:
        ValueError: an axis other than 0 and 1.
    """

    format: Format = E4M3
    size: int = 16
    axis: int = 1

    def __post_init__(self) -> None:
        if self.axis not in (0, 1):
            raise ValueError(f"axis {self.axis}: groups lie along 1, the channels, or 0, the tokens")

    def element_bytes(self, wide: int) -> float:
        """One, and its share of the exponent."""
        return self.format.bytes + 1 / self.size

    def keep(self, x: torch.Tensor) -> Parts:
        """(payload, exponents), both transposed with axis 0; see `ops.group_cast`."""
        return ops.group_cast(x if self.axis else x.t(), self.size, self.format.dtype)

    def restore(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """The values kept, NaN in a group that was not finite."""
        payload, exponents = parts
        x = ops.group_decode(payload, exponents, self.size, dtype)
        return x if self.axis else x.t()


AS_IT_IS, IN_GROUPS = AsItIs(), GroupedFP8()
