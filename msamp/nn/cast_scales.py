"""The scale, amax slot and watch of one cast, and just-in-time scales."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from msamp.kernels import ops
from msamp.kernels.reference.tally import tally_ as reference_tally_
from msamp.numerics.recipe import Cast
from msamp.numerics.scaling import Current, inverse

# Callback after a cast: the values before it, the payload, and scale_inv, 0-dim or per element.
Watch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class CastScales(NamedTuple):
    """The arguments of one cast besides its tensor.

    Attributes:
        scale, scale_inv: FP32 0-dim, known before the cast; None uses a just-in-time scale.
        amax: FP32 0-dim, receives this step's amax; None does not record it.
        watch: optional callback, called after the cast.
    """

    scale: torch.Tensor | None
    scale_inv: torch.Tensor | None
    amax: torch.Tensor | None
    watch: Watch | None = None

    def record(self, x: torch.Tensor) -> None:
        """Record the amax of `x` [M, K], if amaxes are recorded."""
        if self.amax is not None:
            self.amax.copy_(torch.maximum(self.amax, ops.amax(x)))


class RowGroups:
    """Rows of a table of amaxes that share the largest one of their group; at first each row is a group."""

    def __init__(self, rows: int) -> None:
        self._first = list(range(rows))  # by row: the first row of its group
        self._on_device: torch.Tensor | None = None

    def join(self, *members: range) -> None:
        """Make the first rows of the ranges a group, the second rows another, and so on."""
        for rows in zip(*members, strict=True):
            for row in rows:
                self._first[row] = rows[0]

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        """Return for each row of FP32 [rows] the largest amax of its group."""
        if self._first == list(range(len(self._first))):
            return amax
        if self._on_device is None or self._on_device.device != amax.device:
            self._on_device = torch.tensor(self._first, device=amax.device)
        return amax.scatter_reduce(0, self._on_device, amax, "amax")[self._on_device]


def tally_operand_(row: torch.Tensor, x: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor) -> None:
    """Run `ops.tally_` on a watch's arguments: the kernel for one scale, its reference twin on the same device for several."""
    (reference_tally_ if scale_inv.dim() else ops.tally_)(row, x, payload, scale_inv)


def both(first: Watch | None, second: Watch | None) -> Watch | None:
    """Return a watch that calls the two given ones; one of them, or None, if the other is missing."""
    if first is None or second is None:
        return first or second

    def watch(values: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor) -> None:
        first(values, payload, scale_inv)
        second(values, payload, scale_inv)

    return watch


def own_rule(cast: Cast) -> bool:
    """Whether a cast without history has a scaling rule that the kernels do not implement. They implement `Current`."""
    return not cast.scaling.window and type(cast.scaling) is not Current


def just_in_time_scale(cast: Cast, amax: torch.Tensor) -> torch.Tensor:
    """Return the scale for a tensor's own amax, FP32 0-dim. Unless `own_rule`, [n] amaxes give the scales of n tensors."""
    if own_rule(cast):
        return cast.scaling.next_scale(amax.view(1), cast.format.max, 1.0)
    return ops.scale_from_amax(amax, cast.format.max, None, 1.0)


def scales_of_weights(cast: Cast, amaxes: torch.Tensor, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales between stored weights and their FP8 operands.

    Args:
        cast: of the weights, with one scale each.
        amaxes: FP32 [n] or 0-dim, of the stored payloads.
        stored: FP32 of the same shape, their scale_invs.

    Returns:
        The multiplier from payload to FP8, and scale_inv of the FP8 weight, both FP32 of that shape.
    """
    scale = just_in_time_scale(cast, amaxes * stored)
    return scale * stored, inverse(scale)
