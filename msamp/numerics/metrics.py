"""Error metrics of casts: SQNR, underflow and saturation, and their tallies. `descent_quality` has metrics of updates.

SQNR hardly shows elements that underflow to zero, so read the first three together.
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
