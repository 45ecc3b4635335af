"""What layers share: how their norms compute, where kernels leave scales, the cast of a block's gradient, gradients of vectors, outputs
that may be changed in place."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from msamp.kernels import ops
from msamp.nn.gemm import LayerGemm, Operand
from msamp.nn.group_scaling import maxima_for


class Norm(NamedTuple):
    """How a block's norm computes: epsilon, and RMSNorm (no mean, no bias) instead of LayerNorm."""

    eps: float
    rms: bool


def unviewed(y: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`y` in another shape, as the output of an autograd function: of a view made in there autograd forbids every change in place
    (`ReLU(inplace=True)`, `y += x`). Only for a `y` that nothing else holds."""
    return torch.ops.aten._unsafe_view.default(y, shape)


def cast_grad_output(layer: LayerGemm, grad: torch.Tensor, scale_inv: torch.Tensor, *, colsum: bool) -> tuple[Operand, torch.Tensor]:
    """The gradient of a block's output, cast once for both GEMMs of the linear layer that gave it, by the maxima that its kernel has left.

    Args:
        layer: the block's last linear layer.
        grad: [..., N], as autograd hands it over.
        scale_inv: FP32 0-dim holding 0, where the cast leaves its own.
        colsum: give the column sums too, of which the bias's gradient is made.

    Returns:
        The operand in both layouts; FP32 [parts, N], empty without `colsum`.
    """
    rows = grad.reshape(-1, grad.shape[-1])
    payload, payload_t, _, sums = ops.cast_transpose(
        rows,
        layer.grad.scale,
        layer.grad.amax,
        layer.grad_dtype,
        row=True,
        col=True,
        colsum=colsum,
        scale_inv_slot=scale_inv,
        maxima=maxima_for(layer.grad, grad),
    )
    if layer.grad.watch is not None:
        layer.grad.watch(rows, payload, scale_inv)
    return Operand.tensorwise(payload, scale_inv, payload_t), sums


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
