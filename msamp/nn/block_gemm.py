"""One FP8 linear layer as part of a fused block: its GEMMs on operands that other kernels of the block have quantised already."""

from typing import NamedTuple

import torch

from msamp.kernels import ops
from msamp.nn.linear_fn import weight_operand
from msamp.nn.scaling_state import LinearScaling, Slot
from msamp.numerics.recipe import Gemm
from msamp.numerics.tensor import ScalingTensor


class Norm(NamedTuple):
    """How a block's norm computes: epsilon, and RMSNorm (no mean, no bias) instead of LayerNorm."""

    eps: float
    rms: bool


class BlockGemm(NamedTuple):
    """The three GEMMs of one linear layer (`msamp.nn.linear_fn` has them with their casts).

    Attributes:
        gemm: the formats of its operands.
        x, grad: slots of the input and the grad_output, for the kernels that make these operands.
        multiplier, w_scale_inv: from the stored weight into FP8 and back, FP32 0-dim.
    """

    gemm: Gemm
    x: Slot
    grad: Slot
    multiplier: torch.Tensor
    w_scale_inv: torch.Tensor

    @classmethod
    def of(cls, scaling: LinearScaling, weight: ScalingTensor) -> "BlockGemm":
        """With the scales of now; amaxes are recorded while gradients are enabled."""
        x, grad = scaling.slots(record=torch.is_grad_enabled())[:2]
        return cls(scaling.gemm, x, grad, *scaling.weight_scales(weight))

    @property
    def x_dtype(self) -> torch.dtype:
        return self.gemm.input.format.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        return self.gemm.grad_output.format.dtype

    def output(
        self, x8: torch.Tensor, x_scale_inv: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """`x W^T + b` [M, N] of `dtype` from the FP8 input [M, K] and the weight's stored payload [N, K]."""
        w8 = weight_operand(weight, self.multiplier, self.gemm.weight.format.dtype, transpose=False)
        return ops.scaled_mm(x8, w8, x_scale_inv, self.w_scale_inv, None if bias is None else bias.to(dtype), dtype, fast_accum=True)

    def grad_input(self, g8: torch.Tensor, g_scale_inv: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`g W` [M, K] of `dtype` from the FP8 grad_output [M, N] and the weight's stored payload."""
        w8_t = weight_operand(weight, self.multiplier, self.gemm.weight.format.dtype, transpose=True)
        return ops.scaled_mm(g8, w8_t, g_scale_inv, self.w_scale_inv, None, dtype, fast_accum=False)


def grad_weight(
    g8_t: torch.Tensor, g_scale_inv: torch.Tensor, x8_t: torch.Tensor, x_scale_inv: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`g^T x` [N, K] of `dtype` from the transposed FP8 grad_output [N, M] and input [K, M]."""
    return ops.scaled_mm(g8_t, x8_t, g_scale_inv, x_scale_inv, None, dtype, fast_accum=False)


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
