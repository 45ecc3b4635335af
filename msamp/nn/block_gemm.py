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
        return ops.scaled_mm(x8, w8, x_scale_inv, self.w_scale_inv, None if bias is None else bias.to(dtype), dtype, True)

    def grad_input(self, g8: torch.Tensor, g_scale_inv: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`g W` [M, K] of `dtype` from the FP8 grad_output [M, N] and the weight's stored payload."""
        w8_t = weight_operand(weight, self.multiplier, self.gemm.weight.format.dtype, transpose=True)
        return ops.scaled_mm(g8, w8_t, g_scale_inv, self.w_scale_inv, None, dtype, False)


def grad_weight(
    g8_t: torch.Tensor, g_scale_inv: torch.Tensor, x8_t: torch.Tensor, x_scale_inv: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`g^T x` [N, K] of `dtype` from the transposed FP8 grad_output [N, M] and input [K, M]."""
    return ops.scaled_mm(g8_t, x8_t, g_scale_inv, x_scale_inv, None, dtype, False)


def bias_gradient(sums: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Column sums (FP32) as the gradient of `bias`; None where there is none."""
    return None if bias is None else sums.to(bias.dtype)
