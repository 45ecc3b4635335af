"""Amaxes and sums of squares of many gradients."""

from collections.abc import Sequence
from typing import Any

import torch

from msamp.kernels.tables import Tables
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.tensor import ScalingTensor

PAYLOAD_UNITS = 2.0**-3  # FP16's largest square is 2^29 such units, and E4M3's smallest is a multiple of 2^-30 of one


def grad_stats(
    tables: Tables | None,
    gs: Sequence[torch.Tensor],
    factors: torch.Tensor | None = None,
    units: Sequence[int] = (),
    *,
    squares: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return amaxes and sums of squares, both exact and independent of sharding and order.

    The range of a payload is known in advance, so one read gives its amax and squares. The squares of a plain gradient require its amax
    first: call it without `squares`, then with `factors`.

    Args:
        tables: stores the kernel's table of addresses; the twin needs none.
        gs: contiguous plain tensors or ScalingTensors, any shapes, on one device.
        factors: FP64 [n], for the squares of plain `gs`: |g * factor| must be below 4.
        units: with `factors`, a power of two for each gradient, at most 2^46: the squares must be below 2^51 units.
        squares: whether to sum squares.

    Returns:
        FP32 [2, n]: the amax of the values, +inf if one is not finite; and scale_inv, 0 if there is none or it is NaN.
        int64 [n, 2]: sums of (g * factor)^2 in 1 / units, or of payload^2 in 1 / PAYLOAD_UNITS, as whole units and 2^-30 units with
        0 <= those < 2^30. Meaningless if a value is not finite; int64 [0, 2] without `squares`.
    """
    device = gs[0].device if gs else torch.device("cpu")
    if not gs:
        return torch.zeros(2, 0, dtype=torch.float32, device=device), torch.zeros(0, 2, dtype=torch.int64, device=device)
    none = torch.zeros((), device=device, dtype=torch.float32)
    scale_invs = torch.stack([g.scale_inv if isinstance(g, ScalingTensor) and g.numel() else none for g in gs])
    stats = torch.stack([_amaxes(gs), scale_invs.nan_to_num(0.0, posinf=0.0)])
    if not squares:
        return stats, torch.zeros(0, 2, dtype=torch.int64, device=device)
    if factors is None:
        one = torch.ones((), dtype=torch.float64, device=device)
        sums = [square_sum(g.payload, one, PAYLOAD_UNITS) for g in gs]  # type: ignore[attr-defined]
    else:
        sums = [square_sum(g.detach(), factor, unit) for g, factor, unit in zip(gs, factors.unbind(), units, strict=True)]
    return stats, carried(torch.stack(sums))


def check_devices(gs: Sequence[torch.Tensor], *others: Any, **flags: Any) -> None:
    """Raise a ValueError if gradients are on several devices. Arguments as in `grad_stats`, without its tables."""
    if any(g.device != gs[0].device for g in gs):
        devices = sorted({str(g.device) for g in gs})
        raise ValueError(f"gradients are on {', '.join(devices)}; pass gradients of one device")


def carried(sums: torch.Tensor) -> torch.Tensor:
    """Carry whole units out of the 2^-30 units of int64 [n, 2] sums, so that equal numbers have equal bits."""
    return torch.stack([sums[:, 0] + (sums[:, 1] >> 30), sums[:, 1] & (2**30 - 1)], 1)


def square_sum(x: torch.Tensor, factor: torch.Tensor, units: float) -> torch.Tensor:
    """Return the sum of (x * factor)^2 in 1 / `units`, int64 [2]: whole units and 2^-30 units, not `carried`; `factor` is FP64 0-dim."""
    # Each square is computed in FP64 and rounded to whole units; the remainder is rounded to 2^-30 units.
    squares = (x.float().double() * factor).square_().mul_(units)
    whole = squares.round()
    rest = squares.sub_(whole).mul_(2.0**30).round_()
    return torch.stack([whole.to(torch.int64).sum(), rest.to(torch.int64).sum()])


def _amaxes(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    scaled = [x for x in xs if isinstance(x, ScalingTensor)]
    plain = [x for x in xs if not isinstance(x, ScalingTensor)]
    wide = [x for x in scaled if x.payload.itemsize > 1]
    narrow = [x for x in scaled if x.payload.itemsize == 1]
    none = torch.zeros((), dtype=torch.float32, device=xs[0].device)
    # Without the sign bit, FP8 bit patterns have the order of their magnitudes, so no FP32 copy is needed.
    tops = [(x.payload.view(torch.uint8) & 0x7F).max().view(x.payload.dtype).float() if x.numel() else none for x in narrow]
    by_tensor = dict(zip(map(id, plain), TENSORWISE.amaxes(plain).unbind(), strict=True))
    for members, own in ((wide, TENSORWISE.amaxes([x.payload for x in wide]).unbind()), (narrow, tops)):
        if members:
            amax = torch.stack(list(own)) * torch.stack([x.scale_inv for x in members]).abs()
            by_tensor |= zip(map(id, members), amax.unbind(), strict=True)
    amaxes = torch.stack([by_tensor[id(x)] for x in xs])
    return amaxes.masked_fill(amaxes.isnan(), float("inf"))
