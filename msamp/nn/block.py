"""What layers share: how their norms compute, where kernels leave scales, gradients of vectors, outputs that may be changed in place."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from msamp.kernels import ops


class Norm(NamedTuple):
    """How a block's norm computes: epsilon, and RMSNorm (no mean, no bias) instead of LayerNorm."""

    eps: float
    rms: bool


def unviewed(y: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`y` in another shape, as the output of an autograd function: of a view made in there autograd forbids every change in place
    (`ReLU(inplace=True)`, `y += x`). Only for a `y` that nothing else holds."""
    return torch.ops.aten._unsafe_view.default(y, shape)


def vector_gradients(*found: tuple[torch.Tensor, torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients of vectors (biases, norms), each in its vector's dtype, in one launch a dtype; None where there is no vector.

    Args:
        found: of each vector [N] the partial column sums (FP32 [parts, N]), and the vector.
    """
    gradients: list[torch.Tensor | None] = [None] * len(found)
    asked = [(i, parts, vector.dtype) for i, (parts, vector) in enumerate(found) if vector is not None]
    for dtype in {dtype for _, _, dtype in asked}:
        alike = [(i, parts) for i, parts, own in asked if own == dtype]
        for (i, _), gradient in zip(alike, ops.sum_parts([parts for _, parts in alike], dtype), strict=True):
            gradients[i] = gradient
    return gradients


class ScaleInvs:
    """Where the kernels of a block leave the scale_inv of what they quantise: each wants a zero, and one fill gives them all.

    Args:
        count: of zeros that one fill gives.
        device: theirs.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._left: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """FP32 0-dim, holding 0, 16-byte aligned as cuBLAS wants it, and given to nobody else."""
        if not self._left:
            # Detached from the others' version: what is kept for backward is not changed by what is written beside it.
            self._left = [zero.data for zero in torch.zeros(self._count, 4, device=self._device)[:, 0].unbind()]
        return self._left.pop()
