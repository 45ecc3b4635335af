"""Compute the scales between a stored weight and its FP8 operand, in two launches instead of ten."""

import torch

from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.scaling import inverse, scale_from_amax


def weight_scales(payload: torch.Tensor, scale_inv: torch.Tensor, fp_max: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the just-in-time scales from the amax of a stored weight.

    Args:
        payload: FP16, BF16 or FP32, any shape: the stored weight.
        scale_inv: FP32, 0-dim: payload * scale_inv is the weight.
        fp_max: largest value of the operand's format.

    Returns:
        FP32, 0-dim: the multiplier from the payload to the format, scale * scale_inv, and 1 / scale, where scale is the largest power of
        two with amax * scale <= fp_max; 1 if the amax is 0 or not finite.
    """
    scale = scale_from_amax(TENSORWISE.amax(payload) * scale_inv, fp_max)
    return scale * scale_inv, inverse(scale)
