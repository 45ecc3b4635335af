"""From amax to scale, in one launch."""

import torch

from msamp.numerics import scaling


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
