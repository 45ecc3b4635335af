"""Error metrics of casts (SQNR, underflow, saturation, and their tallies) and of updates (EDQ, lost arithmetic, the undelivered share).

SQNR hardly shows elements that underflow to zero, so read the first three together. A weight in few bits rounds away updates far below its
last digit. EDQ measures what is left along the update's direction, lost arithmetic counts the elements that did not move, and the
undelivered share says how much of the distance is missing, which alone is about 0 if stochastic rounding delivers the update on average.
"""

import math
from collections.abc import Sequence

import torch

from msamp.numerics.formats import Format


def sqnr_db(x: torch.Tensor, approx: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB, 10 log10(sum x^2 / sum (x - approx)^2), in FP64; inf if both are equal."""
    x, approx = x.detach().double(), approx.detach().double()
    noise = (x - approx).square().sum()
    if not noise.item():
        return math.inf
    return float(10.0 * torch.log10(x.square().sum() / noise))


def underflow_frac(x: torch.Tensor, approx: torch.Tensor) -> float:
    """Share of the non-zero elements of `x` that are zero in `approx`; 0 if `x` is all zero."""
    nonzero = x != 0
    return float((nonzero & (approx == 0)).sum() / nonzero.sum().clamp(min=1))


def saturation_frac(payload: torch.Tensor, fmt: Format) -> float:
    """Share of the elements of `payload` (of `fmt.dtype`) at the largest magnitude of the format."""
    return float((payload.float().abs() == fmt.max).float().mean())


# The columns of `msamp.kernels.ops.tally_`: all but the last two are sums, so tallies of parts and of ranks can be added.
TALLY = ("elements", "nonzero", "vanished", "saturated", "signal", "noise", "amax", "scale")


def add_tallies(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Combine the tallies of two parts of a tensor, or of two ranks; the scale is the smaller one."""
    amax = math.nan if math.isnan(a[6] + b[6]) else max(a[6], b[6])
    return [*(x + y for x, y in zip(a[:6], b[:6], strict=True)), amax, min(a[7], b[7])]


def judge(tally: Sequence[float]) -> dict[str, float]:
    """Return amax, underflow and saturation shares, SQNR (dB) and scale of a tally, as the functions above define them."""
    elements, nonzero, vanished, saturated, signal, noise, amax, scale = tally
    ratio = signal / noise if noise else math.inf
    return {
        "amax": amax,
        "underflow": vanished / max(1.0, nonzero),
        "saturation": saturated / max(1.0, elements),
        "sqnr_db": 10 * math.log10(ratio) if ratio > 0 else (-math.inf if ratio == 0 else math.nan),
        "scale": scale,
    }


def edq(update: torch.Tensor, effective: torch.Tensor) -> float:
    """Effective descent quality, <update / |update|, effective> in FP64 [Collage, definition 3.3, equation 3].

    Its best value is the norm of the update. For a zero update it is 0.

    Args:
        update: the update that the optimizer computed in its own arithmetic, before it is added (the paper's equation 1); any shape. Along
            the update in FP32 from the same states, the result includes what the optimizer loses while it computes its update.
        effective: the actual change of the parameters (equation 2), same shape.
    """
    update, effective = update.double().flatten(), effective.double().flatten()
    norm = float(update.norm())
    return float(torch.dot(update, effective)) / norm if norm else 0.0


def lost_frac(update: torch.Tensor, effective: torch.Tensor) -> float:
    """Lost arithmetic: the share of parameters that a non-zero update leaves unchanged [Collage]."""
    return float(((update != 0) & (effective == 0)).double().mean())


def undelivered_share(distance: float, arrived: float) -> float:
    """Share of an update that did not reach the parameters, in [0, 1]: 1 - sum sign(update) effective / sum |update|. NaN if a sum is NaN.

    `lost_frac` counts the elements that did not move. With stochastic rounding that is most of them, although the update arrives on
    average. This metric is a mean over the elements: 0 for unbiased rounding, up to noise that shrinks with their number, and for nearest
    rounding the share that is lost for good, if the parameters are already stored values. It is 0 for a zero update.

    Args:
        distance: the sum of |update|, of the update in FP32.
        arrived: the sum of sign(update) times the actual change of the parameters.
    """
    share = 1.0 - arrived / distance if distance else 0.0
    return share if math.isnan(share) else min(1.0, max(0.0, share))
