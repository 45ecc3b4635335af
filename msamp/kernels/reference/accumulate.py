"""Add a gradient to a sum of micro-batches in FP8 or FP16, in place.

Each sum is computed in FP32, gets a new just-in-time scale, and is rounded once. In place, because a CUDA graph of a micro-batch finds the
sum where it was captured; and with random words that a counter on the device selects, because a graph repeats its arguments.
"""

import torch

from msamp.numerics.formats import of_dtype
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse, scale_from_amax
from msamp.numerics.stochastic_rounding import SPREAD, Thresholds, cast_stochastically

NO_STEP = 0  # of `Thresholds`: the draw is part of the key


def accumulate(g: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor, draw: torch.Tensor | None, key: int, first: bool) -> None:
    """Add `g` to the sum `payload * scale_inv`.

    Args:
        g: BF16, FP16 or FP32, contiguous; only read.
        payload: E4M3, E5M2 or FP16, contiguous, in the shape of `g`; changed in place.
        scale_inv: FP32 0-dim, changed in place; NaN once a value was not finite.
        draw: INT64 0-dim, at least 0, raised by one: the number of the draw of random words, for stochastic rounding. None rounds to
            nearest even.
        key: of the random words (`tensor_key`); unused without `draw`.
        first: whether `g` is the first term. The old sum is not read then.
    """
    fmt = of_dtype(payload.dtype)
    values = g.float() if first else payload.float() * scale_inv + g.float()
    amax = TENSORWISE.amax(values)
    scale = scale_from_amax(amax, fmt.max)
    if draw is None:
        payload.copy_(quantize(values, scale, fmt))
    else:
        draw.add_(1)
        thresholds = Thresholds(key_of_draw(key, int(draw)), 0, NO_STEP)  # on a GPU a host sync, which the kernel does without
        payload.copy_(cast_stochastically(values * scale, fmt, thresholds, "m"))
    scale_inv.copy_(inverse(scale).masked_fill(~amax.isfinite(), float("nan")))


def key_of_draw(key: int, draw: int) -> int:
    """Return the key of a draw. Bits above the 32nd change the low word as well: a key with another high word alone gives correlated
    words (0.2 between 4,096 steps)."""
    return key ^ draw ^ ((draw >> 32) * SPREAD)


def add_payload_(g: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor, *, replace: bool = False) -> None:
    """Add FP8 or FP16 numbers to a wide tensor, in FP32, rounded once to its dtype.

    Args:
        g: BF16, FP16 or FP32, contiguous; changed in place.
        payload: E4M3, E5M2 or FP16, contiguous, in the shape of `g`.
        scale_inv: FP32 0-dim; NaN makes every value NaN.
        replace: whether to ignore what `g` holds, and store the numbers.
    """
    values = payload.float() * scale_inv
    g.copy_(values if replace else values + g.float())
