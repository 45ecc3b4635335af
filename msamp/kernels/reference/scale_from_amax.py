"""From amax to scale, in one launch."""

import torch

from msamp.numerics import scaling
from msamp.numerics.granularity import TENSORWISE


def scale_from_amax(amax: torch.Tensor, fp_max: float, last: torch.Tensor | None, otherwise: float) -> torch.Tensor:
    """`msamp.numerics.scaling.scale_from_amax`, the definition: the largest power of two with `amax * scale <= fp_max`.

    Args:
        amax: FP32, any shape, contiguous.
        fp_max: largest value of the target format.
        last: FP32 of the same shape, contiguous: the scale where amax is zero, negative or not finite. None takes `otherwise`.
        otherwise: the scale there, without `last`.

    Returns:
        FP32 scales in the shape of `amax`.
    """
    return scaling.scale_from_amax(amax, fp_max, otherwise if last is None else last)


def scale_from_maxima(maxima: torch.Tensor, fp_max: float) -> torch.Tensor:
    """The second stage of Group Scaling (`msamp.numerics.range_expand.two_stage_amax`) and the scale that follows from it.

    Args:
        maxima: FP32, any shape, contiguous: the largest magnitudes of parts of a tensor, together all of it.
        fp_max: largest value of the target format.

    Returns:
        FP32, 0-dim: `scale_from_amax` of their amax; 1 where that is 0 or not finite.
    """
    return scaling.scale_from_amax(TENSORWISE.amax(maxima), fp_max)
