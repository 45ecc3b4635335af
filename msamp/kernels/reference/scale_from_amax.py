"""Compute scales: from amaxes, and between a stored weight and its FP8 operand."""

import torch

from msamp.numerics import scaling
from msamp.numerics.granularity import TENSORWISE


def scale_from_amax(amax: torch.Tensor, fp_max: float, last: torch.Tensor | None, otherwise: float) -> torch.Tensor:
    """Return the largest power of two with `amax * scale <= fp_max`, as defined by `msamp.numerics.scaling.scale_from_amax`.

    Args:
        amax: FP32, any shape, contiguous.
        fp_max: largest value of the target format.
        last: FP32 of the same shape, contiguous: the scale if amax is zero, negative or not finite. None uses `otherwise`.
        otherwise: the scale for these without `last`.

    Returns:
        FP32 scales in the shape of `amax`.
    """
    return scaling.scale_from_amax(amax, fp_max, otherwise if last is None else last)


def scale_from_maxima(maxima: torch.Tensor, fp_max: float) -> torch.Tensor:
    """Run the second stage of Group Scaling (`msamp.nn.group_scaling`) and return the scale.

    Args:
        maxima: FP32, any shape, contiguous: the largest magnitude of each part of a tensor.
        fp_max: largest value of the target format.

    Returns:
        FP32, 0-dim: `scale_from_amax` of the maximum; 1 if that is 0 or not finite.
    """
    return scaling.scale_from_amax(TENSORWISE.amax(maxima), fp_max)


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
    scale = scaling.scale_from_amax(TENSORWISE.amax(payload) * scale_inv, fp_max)
    return scale * scale_inv, scaling.inverse(scale)
