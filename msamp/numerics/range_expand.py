"""FP8 in groups [COAT]: dynamic range expansion for optimizer states, and group scaling.

A group of Adam's moments covers little of E4M3's dynamic range of 2.3e5. f(x) = sign(x) |x|^k stretches, or compresses, the range of each
group to the range of the format, so that all codes are used and no non-zero element becomes zero.

For x in groups of 128 elements of a row, with max and min the largest and smallest non-zero magnitudes of a group:

    k = log(R) / log(max / min)               R: largest value over smallest subnormal of the format
    q = cast(sign(x) fp_max (|x| / max)^k)    payload in the shape of x; max and k in FP32, one of each per group
    x' = sign(q) max (|q| / fp_max)^(1 / k)

The smallest non-zero magnitude of a group maps to the smallest code and the largest to the largest code. Without expansion, a cast wastes
codes on binades that the group does not reach. Activations use groups of 16 channels with one scale per group and no expansion
(`msamp.kernels.reference.group_cast`). `tools/reproduce/results/coat_states.csv` has the errors of E4M3 and E5M2 for m and v, with and
without expansion.
"""

import math
from dataclasses import dataclass

import torch

from msamp.numerics.formats import FP32, Format, of_dtype
from msamp.numerics.granularity import Group
from msamp.numerics.quantize import cast

STATE_GROUP = Group(128)


@dataclass(frozen=True, eq=False)
class Expanded:
    """A tensor as COAT stores optimizer states; its value is sign(q) max (|q| / fp_max)^(1 / k), group by group.

    Attributes:
        payload: E4M3 or E5M2, in the shape of the tensor.
        max: FP32 [.., groups], the amax of each group. NaN marks a group with non-finite values: all of it loads as NaN.
        k: FP32 [.., groups], the exponent; 1 where the magnitudes of a group are all equal, all zero, or not finite.
        group: which elements share max and k.
    """

    payload: torch.Tensor
    max: torch.Tensor
    k: torch.Tensor
    group: Group = STATE_GROUP

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values: computed in FP64, rounded to FP32 and then to `dtype`."""
        shape, fmt = self.payload.shape, of_dtype(self.payload.dtype)
        q = self.payload.float()
        magnitude = _power(q.abs() / fmt.max, self.group.spread(1 / self.k.double(), shape)) * self.group.spread(self.max, shape)
        return torch.copysign(magnitude.float(), q).to(dtype)


def quantize_expanded(x: torch.Tensor, fmt: Format, group: Group = STATE_GROUP, expand: bool = True) -> Expanded:
    """Quantize group by group with dynamic range expansion: q = cast(sign(x) fp_max (|x| / max)^k), which never leaves FP32's range.

    k = log(R) / log(max / min) [COAT, part 1], where `min` is the smallest non-zero magnitude and R the largest value of the format over
    its smallest subnormal. Zeros stay zero. max / min is computed from the quotients |x| / max in FP32, so that `min` maps to the smallest
    code also in a group of almost equal values; quotients below 2^-126 are clamped to 2^-126.

    Args:
        x: FP32, BF16 or FP16, any shape.
        fmt: E4M3 or E5M2, as such or as COAT's.
        group: which elements share max and k.
        expand: False sets k = 1, which is scaling without expansion, for comparison.
    """
    x = x.detach().float()
    largest = group.maxima(x)
    usable = (largest > 0) & largest.isfinite()
    divisor = largest.masked_fill(~usable, 1.0)
    k = torch.ones_like(largest)
    if expand:
        lowest = (_smallest(x, group) / divisor).clamp(min=FP32.tiny)
        k = torch.where(usable & (lowest < 1), (math.log2(fmt.max / fmt.smallest) / -lowest.double().log2()).float(), k)
    quotient = (x.abs() / group.spread(divisor, x.shape)).clamp(min=FP32.tiny).masked_fill(x == 0, 0.0)
    grown = fmt.max * _power(quotient, group.spread(k.double(), x.shape))
    payload = cast(torch.copysign(grown.float(), x), fmt)
    return Expanded(payload, largest.masked_fill(~largest.isfinite(), float("nan")), k, group)


def _power(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """FP64 x^k. In FP32 the last bit of torch's CPU powers depends on an element's position in memory, so on how a tensor is cut."""
    return x.double().pow(k)


def dynamic_range(x: torch.Tensor, group: Group = STATE_GROUP) -> torch.Tensor:
    """FP64 [.., groups]: largest over smallest non-zero magnitude [COAT, part 1]; NaN where a group is all zero or not finite."""
    largest = group.maxima(x).double()
    return (largest / _smallest(x, group).double()).masked_fill(~((largest > 0) & largest.isfinite()), float("nan"))


def _smallest(x: torch.Tensor, group: Group) -> torch.Tensor:
    """FP32 [.., groups]: the smallest non-zero magnitude, +inf where there is none."""
    magnitude = x.detach().float().abs()
    return group.split(magnitude.masked_fill(magnitude == 0, float("inf")), fill=float("inf")).amin(-1)
