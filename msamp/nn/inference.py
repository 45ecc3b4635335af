"""Batch-invariant FP8 linear layers for inference: the weight in its stored FP8 format, and input scales that depend on one row only.

In training a tensor has one scale, so the result of a row depends on the other rows of the batch. In evaluation it must not:
a sequence must have the same result in any batch. So the kernels of the blockwise recipes cast the input in 1 x 128 blocks with
power-of-two scales. A power of two does not change how an FP8 value above the subnormal range is rounded, and compared with one scale per
tensor, small rows keep bits that they would lose.
"""

import torch

from msamp.nn.cast_scales import CastScales
from msamp.nn.gemm import kernels_of
from msamp.numerics.formats import E4M3
from msamp.numerics.granularity import Block, Group
from msamp.numerics.recipe import Cast, Gemms
from msamp.numerics.scaling import Current
from msamp.numerics.tensor import ScalingTensor

# Used instead of casts that share scales between rows: block shapes that Hopper's GEMMs support.
_INPUT, _WEIGHT = Cast(E4M3, Current(), Block(1, 128)), Cast(E4M3, Current(), Block(128, 128))
_NOTHING = CastScales(None, None, None)


def row_casts(gemm: Gemms) -> tuple[Cast, Cast]:
    """Return the casts of input and weight for inference: the recipe's if its scales stay within a row, otherwise blocks."""
    share = gemm.input.granularity
    within_a_row = isinstance(share, Group) or (isinstance(share, Block) and share.rows == 1)
    return (gemm.input, gemm.weight) if within_a_row and not gemm.input.scaling.window else (_INPUT, _WEIGHT)


class InferenceGemm:
    """y = x W^T + b, where each row of y depends on its own row of x only.

    Args:
        weight: [outputs, inputs]. An FP8 payload is used without a copy; an FP16 payload is cast once, here.
        gemm: the casts of the recipe that the layer was trained with.

    Attributes:
        weight: the operand.
    """

    @torch.no_grad()
    def __init__(self, weight: ScalingTensor, gemm: Gemms) -> None:
        self._cast, weight_cast = row_casts(gemm)
        self._kernels = kernels_of(self._cast.granularity)
        scales = weight.scale_inv, weight.scale_inv
        self.weight = kernels_of(weight_cast.granularity).weight(weight.payload, scales, weight_cast, transpose=False)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [.., inputs] BF16, FP16 or FP32, bias [outputs] of its dtype or None -> [.., outputs] in the dtype of x."""
        rows = x.reshape(-1, x.shape[-1])
        operand = self._kernels.cast(rows, _NOTHING, self._cast, row=True, col=False, combine=None)
        y = self._kernels.multiply(operand, self.weight, bias, x.dtype, fast=False)
        return y.view(*x.shape[:-1], y.shape[-1])
