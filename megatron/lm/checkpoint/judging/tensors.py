"""Rules for the values of a checkpoint's tensors, which a save and a load share. A problem is a text that continues after a tensor's key.

A save judges gigabytes on the device, and must not become much slower. So a large tensor is read once, for its smallest and largest value
(`extents`), and counted only if these break a rule.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from msamp.numerics.formats import FP32
from msamp.numerics.scaling import MAX_EXPONENT

# The square of a larger value overflows FP32, and with it the norm of such weights and the second moment of such gradients. A second moment
# may not be larger either: the run would have had gradients of 2^32.
LARGEST = 2.0**64
_BLOCK = 2**24  # elements to convert to FP32 at a time


def extents(x: Tensor) -> Tensor:
    """Return the smallest and the largest value of `x` and 0, FP32 [2] on its device; NaN if a value is NaN. Does not wait for the device.

    Args:
        x: of a floating-point dtype, any shape.
    """
    if not x.numel():
        return torch.zeros(2, device=x.device)
    if x.element_size() == 1:  # no reductions of FP8 in torch, but its codes are ordered by magnitude, with NaN last
        x = x.reshape(-1)
        negative = x.view(torch.uint8).amax()
        range_ = torch.stack([negative.where(negative >= 128, 0), x.view(torch.int8).amax().clamp(min=0).view(torch.uint8)]).view(x.dtype)
    else:
        range_ = torch.stack(torch.aminmax(x.detach()))
    low, high = range_.float().unbind()
    return torch.stack([low.clamp(max=0), high.clamp(min=0)])


def tensor_problem(
    x: Tensor, extent: Sequence[float], scales: Sequence[float] = (), groups: Sequence[Sequence[float]] = (), *, non_negative: bool = False
) -> str | None:
    """Return what is wrong with a tensor: a value that is not finite, larger than `LARGEST`, or negative where that is impossible; a scale
    that is not a power of two, or out of range; a group with an invalid maximum or exponent. None: nothing.

    Args:
        x: the payload, of any format.
        extent: its `extents`.
        scales: its `scale_inv`; empty for a plain tensor.
        groups: in COAT's formats the `extents` of the groups' maxima, and the smallest and the largest exponent.
        non_negative: whether it must not contain negative values.
    """
    low, high = extent
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = sum(int((~block.float().isfinite()).sum()) for block in x.reshape(-1).split(_BLOCK))
        return f" has {bad} values that are NaN or infinite"
    problem = next(filter(None, [_group_problem(*groups) if groups else None, *map(_scale_problem, scales)]), None)
    if problem is not None:
        return problem
    largest, scale = max(-low, high), max(scales, default=1.0)
    if largest * scale > LARGEST:
        return f" has the value {(high if high == largest else low) * scale:g}; no run can use values above 2^64"
    if non_negative and low < 0:
        below = sum(int((block.float() < 0).sum()) for block in x.reshape(-1).split(_BLOCK))
        return f", a mean of squares, has {below} negative values, such as {low * scale:g}"
    return None


def _scale_problem(scale_inv: float) -> str | None:
    if 2.0**-MAX_EXPONENT <= scale_inv <= 2.0**MAX_EXPONENT and math.frexp(scale_inv)[0] == 0.5:
        return None
    return f" has scale_inv {scale_inv:g}, which is not a power of two in [2^-{MAX_EXPONENT}, 2^{MAX_EXPONENT}]"


def _group_problem(maxima: Sequence[float], exponents: Sequence[float]) -> str | None:
    for name, values, least, most in (("maximum", maxima, 0.0, LARGEST), ("exponent", exponents, FP32.tiny, FP32.max)):
        wrong = [value for value in values if not least <= value <= most]
        if wrong:
            return f" has groups with a maximum or exponent out of range: {name} {wrong[0]:g}"
    return None


def number_problem(value: float, low: float, high: float, dtype: torch.dtype, *, whole: bool = False) -> str | None:
    """Return what is wrong with a number that must be in [low, high], and an integer if `whole`; `dtype`: how it is stored."""
    if low <= value <= high and not (whole and value != math.floor(value)):
        return None
    return f" is {value}; it must be one {dtype} in [{low}, {high}]{' without a fraction' if whole else ''}"
