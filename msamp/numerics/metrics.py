"""How much a representation loses: SQNR, underflow, saturation, and Collage's EDQ and lost arithmetic.

SQNR alone is blind to elements that vanish, so the first three are always read together.
"""

import math
from collections.abc import Sequence

import torch

from msamp.numerics.formats import Format


def sqnr_db(x: torch.Tensor, approx: torch.Tensor) -> float:
    """Signal to quantisation-noise ratio in dB, 10 log10(sum x^2 / sum (x - approx)^2), in FP64; inf where they are equal."""
    x, approx = x.detach().double(), approx.detach().double()
    noise = (x - approx).square().sum()
    if not noise.item():
        return math.inf
    return float(10.0 * torch.log10(x.square().sum() / noise))


def underflow_frac(x: torch.Tensor, approx: torch.Tensor) -> float:
    """Share of the non-zero elements of `x` that are zero in `approx`; 0 where `x` has none."""
    nonzero = x != 0
    return float((nonzero & (approx == 0)).sum() / nonzero.sum().clamp(min=1))


def saturation_frac(payload: torch.Tensor, fmt: Format) -> float:
    """Share of the elements of `payload` (of `fmt.dtype`) whose magnitude is the largest of the format."""
    return float((payload.float().abs() == fmt.max).float().mean())


# What `tally_` adds up, in this order: all but the last two are sums, so that parts of a tensor and ranks may be added.
TALLY = ("elements", "nonzero", "vanished", "saturated", "signal", "noise", "amax", "scale")
CHUNK = 2**23  # elements looked at in one go: three FP64 temporaries of 64 MiB


@torch.no_grad()
def tally_(row: torch.Tensor, x: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor, fmt: Format) -> None:
    """Add to `row` how `payload`, made from `x`, represents it: on the device, without a host sync, so that a CUDA graph may hold it.

    Args:
        row: FP64 [8], changed in place: counts of elements, of non-zero ones, of those of them that are zero in the payload, of those at
            the format's maximum; sums of x^2 and of (x - payload * scale_inv)^2; raised to the amax of x; the scale, that of this call.
        x: any float dtype and shape.
        payload: as many elements in the same order.
        scale_inv: FP32 0-dim.
        fmt: of the payload.
    """
    for part, stored in zip(x.reshape(-1).split(CHUNK), payload.reshape(-1).split(CHUNK), strict=True):
        values, codes = part.double(), stored.float()
        nonzero = values != 0
        counts = (nonzero, nonzero & (codes == 0), codes.abs() == fmt.max)
        noise = (codes.double() * scale_inv - values).square().sum()
        row[1:6] += torch.stack([*(mask.sum(dtype=torch.float64) for mask in counts), values.square().sum(), noise])
        row[6] = torch.maximum(row[6], values.abs().amax())
    row[0] += x.numel()
    row[7] = 1 / scale_inv.double()


def add_tallies(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """The tally of two parts, or of two ranks' shares, of a tensor; the scale is the smaller one."""
    amax = math.nan if math.isnan(a[6] + b[6]) else max(a[6], b[6])
    return [*(x + y for x, y in zip(a[:6], b[:6], strict=True)), amax, min(a[7], b[7])]


def judge(tally: Sequence[float]) -> dict[str, float]:
    """amax, underflow and saturation shares, SQNR (dB) and scale of a tally, as the functions above define them."""
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
    """Effective descent quality, <update / |update|, effective> in FP64 [Collage, definition of EDQ].

    Args:
        update: the update that the optimizer wanted, any shape.
        effective: the change of the parameters' value that took place, same shape.
    """
    update, effective = update.double().flatten(), effective.double().flatten()
    return float(torch.dot(update / update.norm(), effective))


def lost_frac(update: torch.Tensor, effective: torch.Tensor) -> float:
    """Lost arithmetic: share of the parameters left unchanged by a non-zero update [Collage]."""
    return float(((update != 0) & (effective == 0)).double().mean())
