"""An FP8 linear layer in inference: the weight in its stored FP8, and inputs with scales that depend on their own row alone.

In training a tensor has one scale, so that the result of a row depends on the other rows of the batch. In generation and evaluation it must
not: a sequence has the same result as alone. So the input is cast in blocks of a row, 1 x 128, with powers of two as scales, by the kernels
of the blockwise recipes. A power of two changes no rounding of an FP8 value above the subnormal range. Against one scale for the tensor,
small rows keep bits which they would have lost.
"""

import torch

from msamp.nn.cast_scales import CastScales
from msamp.nn.gemm import Operand, kernels_of
from msamp.numerics.formats import E4M3
from msamp.numerics.granularity import Block, Group
from msamp.numerics.recipe import Cast, Gemms
from msamp.numerics.scaling import Current
from msamp.numerics.tensor import ScalingTensor

# In place of a recipe's casts that share scales between rows: blocks that Hopper multiplies itself.
_INPUT, _WEIGHT = Cast(E4M3, Current(), Block(1, 128)), Cast(E4M3, Current(), Block(128, 128))
_NOTHING = CastScales(None, None, None)


def row_casts(gemm: Gemms) -> tuple[Cast, Cast]:
    """How input and weight are cast in inference: as the recipe says where its scales stay within a row, else in blocks."""
    share = gemm.input.granularity
    within_a_row = isinstance(share, Group) or (isinstance(share, Block) and share.rows == 1)
    return (gemm.input, gemm.weight) if within_a_row and not gemm.input.scaling.window else (_INPUT, _WEIGHT)


class InferenceGemm:
    """y = x W^T + b, each row of x by itself.

    Args:
        weight: [outputs, inputs]. An FP8 payload is taken as it is, without a copy; an FP16 one is cast once, here.
        gemm: the casts of the recipe that the layer was trained with.

    Attributes:
        weight: the operand.

    It sees later changes of an FP8 weight's payload, and none of its scale or of an FP16 weight: after a step of the optimizer call
    `renew`.
    """

    def __init__(self, weight: ScalingTensor, gemm: Gemms) -> None:
        self._cast, self._weight_cast = row_casts(gemm)
        self._kernels = kernels_of(self._cast.granularity)
        self.weight, self._copied = self._taken(weight)

    @torch.no_grad()
    def _taken(self, weight: ScalingTensor) -> tuple[Operand, tuple[bool, bool]]:
        """The operand, and whether its payload and its scales are copies."""
        cast, scales = self._weight_cast, (weight.scale_inv, weight.scale_inv)
        made = kernels_of(cast.granularity).weight(weight.payload, scales, cast, False)
        pairs = ((made.codes, weight.payload), (made.scale_inv, weight.scale_inv))
        copied, copied_scales = (mine.data_ptr() != stored.data_ptr() for mine, stored in pairs)
        return made, (copied, copied_scales)

    @torch.no_grad()
    def renew(self, weight: ScalingTensor) -> None:
        """Take the weight as it is now, or another one of its shape.

        A copy that the operand has made keeps its address, so that a CUDA graph reads the new one; a payload that is taken as it is stands
        where the weight's stands now.

        Args:
            weight: [outputs, inputs].
        """
        made, copied = self._taken(weight)
        before = (self.weight.codes, self.weight.scale_inv)
        payload, scale_inv = (
            old.copy_(new) if own and owned and _alike(old, new) else new
            for old, new, own, owned in zip(before, (made.codes, made.scale_inv), self._copied, copied, strict=True)
        )
        self.weight, self._copied = made._replace(payload=payload, scale_inv=scale_inv, scale_inv_t=scale_inv), copied

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [.., inputs] BF16, FP16 or FP32, bias [outputs] of its dtype or None -> [.., outputs] of the dtype of x."""
        rows = x.reshape(-1, x.shape[-1])
        operand = self._kernels.cast(rows, _NOTHING, self._cast, True, False, None)
        y = self._kernels.multiply(operand, self.weight, bias, x.dtype, False)
        return y.view(*x.shape[:-1], y.shape[-1])


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
