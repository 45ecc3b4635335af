"""Load and store optimizer states in every format: scales from bounds, nearest or stochastic rounding, and two guards.

A second moment above 0 is stored as at least its format's smallest value, and the code of a first moment without a gradient decreases.
`kernels.reference.adamw` explains why.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from msamp.numerics.formats import Format, of_dtype
from msamp.numerics.quantize import cast
from msamp.numerics.scaling import inverse, scale_from_amax
from msamp.numerics.stochastic_rounding import Thresholds, cast_stochastically
from msamp.numerics.tensor import ScalingTensor, fp32_values


class Rounding(NamedTuple):
    """Whether each state with fewer bits than FP32 is rounded stochastically (`numerics.stochastic_rounding`), or else to nearest even."""

    m: bool = False
    v: bool = False
    masters: bool = False


NEAREST = Rounding()


def rounding_of(moments: str, masters: str, v: Format, beta2: float) -> Rounding:
    """Return the rounding of m, v and master for the requested "nearest" or "stochastic" rounding of moments and masters.

    With nearest rounding, v stalls if (1 - beta2) |g^2 - v| is below half a code: within 2^-(mantissa_bits + 1) / (1 - beta2) of v. If that
    is below 2 %, it changes a step by less than 1 %, and v always uses nearest rounding, which has half the error and costs less time. This
    is so for FP16 at beta2 0.95 (1 %), but not at 0.999 (49 %).
    """
    stall = 2.0 ** -(v.mantissa_bits + 1) / (1 - beta2) if beta2 < 1 else math.inf
    return Rounding(moments == "stochastic", moments == "stochastic" and stall > 0.02, masters == "stochastic")


def load(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return FP32 values; an FP32 state is returned without a copy."""
    return [fp32_values(state) if isinstance(state, ScalingTensor) else state.float() for state in states]


def is_rounded(states: Sequence[Any]) -> bool:
    """Whether states have fewer bits than FP32."""
    return isinstance(states[0], ScalingTensor) or states[0].dtype != torch.float32


def store_(
    states: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    bounds: torch.Tensor | None,
    thresholds: Sequence[Thresholds] | None = None,
    name: str = "",
    *,
    positive: bool = False,
    no_gradient: Sequence[torch.Tensor] | None = None,
) -> None:
    """Overwrite states, plain or ScalingTensors of one format, with FP32 `values`; FP16 saturates.

    Args:
        bounds: FP32 [len(states)], each at least the amax of its values, from which the scale follows; a bound of zero keeps the last
            scale. None for plain states.
        thresholds: of each state, for stochastic rounding; None rounds to nearest.
        name: the state that has these thresholds: "m", "v" or "master".
        positive: store at least the format's smallest value if the bound is above 0.
        no_gradient: bool, in the shapes of the values: elements without a gradient, whose code must decrease; None: no elements.
    """
    if not is_rounded(states):
        for state, value in zip(states, values, strict=True):
            if state is not value:
                state.copy_(value)
        return
    fmt = of_dtype((states[0].payload if isinstance(states[0], ScalingTensor) else states[0]).dtype)
    scaled = isinstance(states[0], ScalingTensor)
    inverses: list[Any] = [None] * len(states)
    scales: list[Any] = [None] * len(states)
    if scaled:
        assert bounds is not None
        scale_invs = [state.scale_inv for state in states]  # type: ignore[attr-defined]
        new_scales = scale_from_amax(bounds, fmt.max, inverse(torch.stack(scale_invs)))
        scales, inverses = list(new_scales.unbind()), list(inverse(new_scales).unbind())
    for i, (state, value) in enumerate(zip(states, values, strict=True)):
        x = value if scales[i] is None else value * scales[i]
        if positive:
            x = x.clamp(min=(bounds[i] > 0).float() * fmt.smallest if bounds is not None else fmt.smallest)
        here = None if no_gradient is None else no_gradient[i]
        if thresholds is not None:
            payload = cast_stochastically(x, fmt, thresholds[i], name, here)
        else:
            payload = cast(x, fmt)
            if here is not None:
                payload = fallen(payload, fp32_values(state).abs() * (1.0 if scales[i] is None else scales[i]), here)
        (state.payload if scaled else state).copy_(payload)  # type: ignore[attr-defined]
    if scaled:
        torch._foreach_copy_(scale_invs, inverses)


def fallen(payload: torch.Tensor, before: torch.Tensor, no_gradient: torch.Tensor) -> torch.Tensor:
    """Return `payload` with the next smaller code wherever the gradient is 0 and rounding did not decrease the value.

    Args:
        payload: of the new values, FP8, FP16 or BF16.
        before: FP32, the magnitudes of the values that it replaces, in units of the new payload.
        no_gradient: bool, whether the gradient is 0.
    """
    magnitude = payload.float().abs()
    held = no_gradient & (magnitude > 0) & (magnitude >= before)
    # Apart from the sign bit, codes have the order of their magnitudes.
    codes = payload.view(torch.uint8 if payload.element_size() == 1 else torch.int16)
    return (codes - held.to(codes.dtype)).view(payload.dtype)
