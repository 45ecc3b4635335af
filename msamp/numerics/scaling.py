"""From amax to scale: the power-of-two rule, and which amax it is asked with."""

import functools
import struct
from dataclasses import dataclass

import torch

from msamp.numerics.formats import Format

_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23
_MAX_EXPONENT = 126


@functools.cache
def _fields(value: float) -> tuple[int, int]:
    """Exponent and mantissa fields of a positive FP32 value."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return bits >> _MANTISSA_BITS, bits & ((1 << _MANTISSA_BITS) - 1)


def scale_from_amax(amax: torch.Tensor, fp_max: float, last: torch.Tensor | float = 1.0) -> torch.Tensor:
    """The largest power of two with `amax * scale <= fp_max`, its exponent clamped to +-126.

    Computed from the exponent bits, on the device of `amax` and without a host sync: an FP32 division or log2 is off by
    a factor of two next to powers of two.

    Args:
        amax: FP32, any shape.
        fp_max: largest value of the target format.
        last: FP32 of the same shape (or a number): the scale kept where amax is zero, negative or not finite.

    Returns:
        FP32 scales in the shape of `amax`.
    """
    max_exponent, max_mantissa = _fields(fp_max)
    bits = amax.view(torch.int32)
    exponent = max_exponent - (bits >> _MANTISSA_BITS) - ((bits & ((1 << _MANTISSA_BITS) - 1)) > max_mantissa).int()
    exponent = exponent.clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
    scale = ((exponent + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float32)
    keep = ~((amax > 0) & amax.isfinite())
    return torch.where(keep, last, scale) if isinstance(last, torch.Tensor) else scale.masked_fill(keep, last)


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """`scale_inv` of a power-of-two `scale` (FP32, exact)."""
    return scale.reciprocal()


@dataclass(frozen=True)
class Current:
    """Just-in-time scaling: the scale of a tensor comes from that tensor's own amax."""

    window: int = 0

    def __str__(self) -> str:
        return "current"


@dataclass(frozen=True)
class Delayed:
    """Delayed scaling: the scale comes from the largest amax of the last `window` steps (FP8-LM appendix A.2).

    Until the window is filled the scaling is just-in-time, so that no first steps run with a guessed scale. A tensor that
    was not there for a whole window (an idle layer) comes back with the last scale it had.
    """

    window: int = 16

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"delayed scaling window is {self.window}; it must be at least 1 step")

    def __str__(self) -> str:
        return f"delayed({self.window})"


Scaling = Current | Delayed


class AmaxHistory:
    """The amax of the last steps of one tensor and the scale that follows: the definition of delayed scaling, one slot.

    An amax that is not finite enters as 0: its step is skipped, and in the window it would hold the scale for as long.

    `msamp.nn.scaling_state` keeps the same for all tensors of a model in flat arrays.

    Args:
        scaling: the rule.
        fmt: the format scaled into.
    """

    def __init__(self, scaling: Scaling, fmt: Format) -> None:
        self.scaling = scaling
        self.fmt = fmt
        self.amaxes: list[torch.Tensor] = []
        self.last: torch.Tensor | float = 1.0

    def step(self, amax: torch.Tensor) -> torch.Tensor:
        """The scale to quantise this step's tensor with, given its amax (FP32, 0-dim); then records the amax."""
        filled = self.scaling.window > 0 and len(self.amaxes) >= self.scaling.window
        source = torch.stack(self.amaxes).amax() if filled else amax
        self.last = scale_from_amax(source, self.fmt.max, self.last)
        self.amaxes = [*self.amaxes, amax.masked_fill(~amax.isfinite(), 0.0)][-self.scaling.window :] if self.scaling.window else []
        return self.last
