"""The scales between a stored weight and its FP8 operand, in two launches: as torch operations they are ten."""

import torch

from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.scaling import inverse, scale_from_amax


def weight_scales(payload: torch.Tensor, scale_inv: torch.Tensor, fp_max: float) -> tuple[torch.Tensor, torch.Tensor]:
    """From the amax of a stored weight, just in time.

    Args:
        payload: FP16 or BF16 or FP32, any shape: the weight as it is stored.
        scale_inv: FP32, 0-dim: payload * scale_inv is the weight.
        fp_max: largest value of the operand's format.

    Returns:
        FP32, 0-dim: the multiplier from the payload into the format, scale * scale_inv, and 1 / scale, where scale is the largest power of
        two with amax * scale <= fp_max; 1 where the amax is 0 or not finite.
    """
    scale = scale_from_amax(TENSORWISE.amax(payload) * scale_inv, fp_max)
    return scale * scale_inv, inverse(scale)
