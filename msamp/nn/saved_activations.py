"""Formats in which the input of a non-linear layer (norm, GELU, SwiGLU) is saved for backward: unchanged, or in FP8 groups as in COAT.

Forward computes with the unrounded input; only the copy for backward is rounded. The inputs of linear layers are not saved here: a fused
block recomputes them from these copies, and other linear layers save them in FP8 with one scale per tensor. Recomputed from groups of 16
they are rounded twice, which costs about 1 dB of a weight gradient's 24 dB (`tools/reproduce/results/coat_activations.csv`). COAT saves
them instead. In a fused block of a GPT that would take 6 bytes per token and channel, as much as the groups save.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from msamp.kernels import ops
from msamp.numerics.formats import E4M3, Format
from msamp.numerics.granularity import Block
from msamp.numerics.quantize import dequantize

Parts = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Saved:
    """A format for saved activations: as it is, unchanged."""

    def element_bytes(self, wide: int) -> float:
        """Return the saved bytes per element, for a tensor with `wide` bytes per element."""
        return wide

    def keep(self, x: torch.Tensor) -> Parts:
        """Return the tensors to save for backward instead of `x` [M, N] BF16, FP16 or FP32; always the same number of tensors."""
        return (x,)

    def restore(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """Return [M, N] in `dtype`, the dtype of `x`, from the tensors of `keep`."""
        return parts[0]


class SavedBytes(NamedTuple):
    """Bytes per token that a fused block saves for backward: for its norm, without the statistics (8 bytes), and for the rest."""

    norm: float
    inner: float


@dataclass(frozen=True)
class GroupedFP8(Saved):
    """Save in FP8 with a power-of-two scale_inv, stored as one exponent byte, for every group of `size` elements (COAT: mixed granularity).

    Attributes:
        format: E4M3 or E5M2.
        size: elements per group, a power of two; 16 in COAT's paper.
        axis: the axis of a group: 1, the channels of a token; 0, the tokens of a channel, which costs accuracy at a norm's input according
            to COAT's project page.

    Raises:
        ValueError: if `axis` is not 0 or 1.
    """

    format: Format = E4M3
    size: int = 16
    axis: int = 1

    def __post_init__(self) -> None:
        if self.axis not in (0, 1):
            raise ValueError(f"axis is {self.axis}; choose 1 (groups along the channels) or 0 (along the tokens)")

    def element_bytes(self, wide: int) -> float:
        """Return 1 byte plus the element's share of the exponent."""
        return self.format.bytes + 1 / self.size

    def keep(self, x: torch.Tensor) -> Parts:
        """Return (payload, exponents), both transposed with axis 0; see `ops.group_cast`."""
        return ops.group_cast(x if self.axis else x.t(), self.size, self.format.dtype)

    def restore(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized values, NaN in a group that was not finite."""
        payload, exponents = parts
        x = ops.group_decode(payload, exponents, self.size, dtype)
        return x if self.axis else x.t()


@dataclass(frozen=True)
class ExactGroups(Saved):
    """Save in E4M3 with an FP32 scale_inv = amax / 448 for every group of 16 channels, as the code that COAT's authors published (there
    the scale_inv is BF16)."""

    def element_bytes(self, wide: int) -> float:
        """Return 1 byte plus the element's share of scale_inv."""
        return E4M3.bytes + 4 / 16

    def keep(self, x: torch.Tensor) -> Parts:
        """Return (payload, scale_inv); see `ops.block_cast`."""
        return ops.block_cast(x, None, None, rows=1, columns=16, dtype=E4M3.dtype, scale_rule="fp32", row=True, col=False)[:2]

    def restore(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized values, NaN in a group that was not finite."""
        payload, scale_inv = parts
        return dequantize(payload, Block(1, 16).spread(scale_inv, payload.shape), dtype)


AsItIs = Saved  # the name in blocks that were pickled before
AS_IT_IS, IN_GROUPS, IN_EXACT_GROUPS = Saved(), GroupedFP8(), ExactGroups()
