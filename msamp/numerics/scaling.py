"""Scaling rules: which amax a tensor is scaled by (current or delayed), and how an amax becomes a scale."""

import functools
import math
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23
MAX_EXPONENT = 126  # the largest exponent of a scale, positive or negative
MAX_MARGIN = 16
SMALLEST = 2.0**-MAX_EXPONENT  # the smallest scale_inv of `Exact`: FP32's smallest normal value
NOT_FINITE = 255  # NaN of E8M0


@functools.cache
def _fields(value: float) -> tuple[int, int]:
    """Exponent and mantissa fields of a positive FP32 value."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return bits >> _MANTISSA_BITS, bits & ((1 << _MANTISSA_BITS) - 1)


def scale_from_amax(amax: torch.Tensor, fp_max: float, last: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Return the largest power of two with `amax * scale <= fp_max`, its exponent clamped to +-126.

    The exponent bits are computed on the device of `amax`, without a host sync. An FP32 division or log2 would be off by a factor of two
    next to powers of two.

    Args:
        amax: FP32, any shape.
        fp_max: largest value of the target format.
        last: FP32 of the same shape, or a number: the scale to keep where amax is zero, negative or not finite.

    Returns:
        FP32 scales in the shape of `amax`.
    """
    max_exponent, max_mantissa = _fields(fp_max)
    # A mantissa above that of `fp_max` carries into the exponent.
    carried = (amax.view(torch.int32) + ((1 << _MANTISSA_BITS) - 1 - max_mantissa)) >> _MANTISSA_BITS
    exponent = (max_exponent + _EXPONENT_BIAS - carried).clamp(_EXPONENT_BIAS - MAX_EXPONENT, _EXPONENT_BIAS + MAX_EXPONENT)
    return torch.where((amax > 0) & (amax < math.inf), (exponent << _MANTISSA_BITS).view(torch.float32), last)


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return the `scale_inv` of a power-of-two `scale` (FP32, exact)."""
    return scale.reciprocal()


class Scaling(ABC):
    """A scaling rule: the scale of a cast, given the amaxes of previous steps.

    To write one, derive a frozen dataclass; layers reject anything else. Callers use only `window` and `next_scale`.

    Attributes:
        window: number of steps in the amax history. Until the history is full, and always if it is 0, the scale is just-in-time:
            `next_scale` of the tensor's own amax.
        kept_dtype: dtype of `scale_inv`.
    """

    window: int
    kept_dtype: ClassVar[torch.dtype] = torch.float32

    @abstractmethod
    def next_scale(self, history: torch.Tensor, fp_max: float, last: torch.Tensor | float = 1.0) -> torch.Tensor:
        """Return the scale of the next cast, computed on the device of `history` without a host sync.

        Args:
            history: FP32 [.., steps], amaxes, the oldest first; `steps` is `window`, or 1 for a rule without a window.
            fp_max: largest value of the target format.
            last: FP32 [..] or a number: the scale to keep where no amax is positive and finite.

        Returns:
            FP32 [..].
        """

    def scale_inv(self, amax: torch.Tensor, fp_max: float) -> torch.Tensor:
        """Return the stored scale_inv of blocks that are scaled just in time (`msamp.numerics.block_scale`).

        Args:
            amax: FP32, any shape, not negative; +inf where a block is not finite.
            fp_max: largest value of the target format.

        Returns:
            scale_inv in `kept_dtype` and the shape of `amax`; NaN where a block is not finite.
        """
        return inverse(self.next_scale(amax.unsqueeze(-1), fp_max)).masked_fill(~amax.isfinite(), float("nan"))


@dataclass(frozen=True)
class Current(Scaling):
    """Just-in-time scaling: a tensor's scale follows from its own amax."""

    window: int = field(default=0, init=False)

    def next_scale(self, history: torch.Tensor, fp_max: float, last: torch.Tensor | float = 1.0) -> torch.Tensor:
        return scale_from_amax(history[..., -1], fp_max, last)

    def __str__(self) -> str:
        return "current"


@dataclass(frozen=True)
class Exact(Scaling):
    """Just-in-time FP32 scales that map the amax to the format's largest value, for blocks (DeepSeek-V3).

    scale_inv = amax / fp_max is stored, and the scale is its reciprocal (`msamp.numerics.block_scale`, rule "fp32").
    """

    window: int = field(default=0, init=False)

    def next_scale(self, history: torch.Tensor, fp_max: float, last: torch.Tensor | float = 1.0) -> torch.Tensor:
        scale = self.scale_inv(history[..., -1], fp_max).reciprocal()
        return scale.masked_fill(scale.isnan(), 1.0)

    def scale_inv(self, amax: torch.Tensor, fp_max: float) -> torch.Tensor:
        scale_inv = amax.clamp(min=fp_max * SMALLEST) / torch.full_like(amax, fp_max)  # `/ fp_max` takes a reciprocal in CUDA
        return scale_inv.masked_fill(amax == 0, 1.0).masked_fill(~amax.isfinite(), float("nan"))

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True)
class SharedExponent(Scaling):
    """Just-in-time power-of-two scales, kept in one byte, for blocks (E8M0 of OCP Microscaling v1.0; `msamp.numerics.block_scale`).

    Attributes:
        round_up: False maps the amax to the format's last binade, so that values above fp_max saturate (rule "e8m0"). True takes the
            smallest scale_inv at which none does, as Transformer Engine (rule "e8m0-up").
    """

    window: int = field(default=0, init=False)
    kept_dtype: ClassVar[torch.dtype] = torch.uint8
    round_up: bool = False

    def next_scale(self, history: torch.Tensor, fp_max: float, last: torch.Tensor | float = 1.0) -> torch.Tensor:
        amax = history[..., -1]
        if self.round_up:
            return scale_from_amax(amax, fp_max, last)
        binade = 2.0 ** math.floor(math.log2(fp_max))
        return scale_from_amax((amax.view(torch.int32) & 0x7F800000).view(torch.float32), binade, last)

    def scale_inv(self, amax: torch.Tensor, fp_max: float) -> torch.Tensor:
        (exponent_field, mantissa), bits = _fields(fp_max), amax.view(torch.int32)
        # The exponent field of a subnormal amax is 0, which means 2^-127: too large, but it is clamped all the same.
        exponent = (bits >> _MANTISSA_BITS) - (exponent_field - _EXPONENT_BIAS)
        if self.round_up:
            exponent = exponent + ((bits & ((1 << _MANTISSA_BITS) - 1)) > mantissa).int()
        return exponent.clamp(min=0).masked_fill(~amax.isfinite(), NOT_FINITE).to(torch.uint8)

    def __str__(self) -> str:
        return "shared exponent, rounded up" if self.round_up else "shared exponent"


ALGORITHMS = ("max", "most_recent")


@dataclass(frozen=True)
class Delayed(Scaling):
    """Delayed scaling: the scale comes from the amaxes of the last `window` steps (FP8-LM appendix A.2).

    Until the window is full, scaling is just-in-time, so that the first steps do not run with a guessed scale. A layer that was idle for a
    whole window resumes with its last scale.

    Attributes:
        window: steps. Megatron-LM's `--fp8-amax-history-len`.
        algorithm: "max", the largest in the window, or "most_recent", the last one. Megatron-LM's `--fp8-amax-compute-algo`.
        margin: the scale is divided by 2^margin, as headroom for a growing amax. Megatron-LM's `--fp8-margin`. Just-in-time scales have no
            margin, since they know the amax.

    Raises:
        ValueError: a window below 1, an unknown algorithm, or a margin outside [0, 16].
    """

    window: int = 16
    algorithm: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"delayed scaling window is {self.window}; it must be at least 1 step")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"delayed scaling algorithm {self.algorithm!r} is unknown; choose one of {', '.join(ALGORITHMS)}")
        if not 0 <= self.margin <= MAX_MARGIN:
            raise ValueError(f"delayed scaling margin is {self.margin}; it must be in [0, {MAX_MARGIN}], powers of two of headroom")

    def next_scale(self, history: torch.Tensor, fp_max: float, last: torch.Tensor | float = 1.0) -> torch.Tensor:
        amax = history.amax(-1) if self.algorithm == "max" else history[..., -1]
        # The margin scales fp_max: exact, because it is a power of two, and `last` is not divided a second time.
        return scale_from_amax(amax, fp_max * 2.0**-self.margin, last)

    def __str__(self) -> str:
        options = [
            str(self.window),
            *([self.algorithm] if self.algorithm != "max" else []),
            *([f"margin {self.margin}"] if self.margin else []),
        ]
        return f"delayed({', '.join(options)})"
