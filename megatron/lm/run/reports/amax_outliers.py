"""Find scales of delayed scaling that one large amax holds down.

With the maximum over a window, one finite outlier determines a tensor's scale for the length of the window. Ordinary values then lose as
many powers of two of the format's range as the outlier exceeds them. `docs/guide/when_something_goes_wrong.md` describes the effect.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from msamp.nn.scaling_state import TensorScales

FACTOR = 2.0**6  # an outlier exceeds this multiple of the median of the other amaxes in its window


@torch.no_grad()
def bits_held_down(scales: TensorScales) -> Tensor:
    """Return by how many powers of two each row's scale would be larger without the outliers in its history.

    An outlier is an amax of more than `FACTOR` times the median of the other non-zero amaxes.

    Args:
        scales: with a window.

    Returns:
        FP64 [rows] on the device of the histories, without a host sync; 0 for rows without an outlier, without their own window, or with a
        rule that no longer uses the outlier.
    """
    history, top = scales.history, scales.history.argmax(-1, keepdim=True)
    others = history.scatter(-1, top, 0.0)
    median = others.masked_fill(others == 0, float("nan")).nanmedian(-1, keepdim=True).values
    ordinary = torch.where(history > FACTOR * median, median, history)  # a NaN median (no other amax) compares False
    bits = torch.zeros(len(history), dtype=torch.float64, device=history.device)
    for row, cast in enumerate(scales.casts):
        if cast.scaling.window:
            window = slice(len(history[row]) - cast.scaling.window, None)
            now, without = (cast.scaling.next_scale(x[row, window], cast.format.max, scales.scale[row]) for x in (history, ordinary))
            bits[row] = (without.double() / now.double()).log2().round().clamp(min=0.0)
    return bits


def outliers(
    layers: Sequence[tuple[str, TensorScales, Mapping[int, str]]], bits: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, int]]:
    """Return the positive `bits_held_down` by layer and tensor, over all ranks. Collective; the first rank has the result.

    Args:
        layers: of this rank: the layer's name in the whole model, its scales, and the names of its tensors by row.
        bits: results of `bits_held_down` by layer name.
    """
    own_rows: dict[str, dict[str, int]] = {}
    for name, _, tensors in layers:
        for row, lost in enumerate(bits[name]):
            if lost and row in tensors:
                own_rows.setdefault(name, {})[tensors[row]] = int(lost)
    ranks = torch.distributed.get_world_size()
    if ranks == 1:
        return own_rows
    everything: list[Any] | None = [None] * ranks if torch.distributed.get_rank() == 0 else None
    torch.distributed.gather_object(own_rows, everything)
    together: dict[str, dict[str, int]] = {}
    for name, tensors in (item for of_rank in everything or () for item in of_rank.items()):
        together.setdefault(name, {}).update(tensors)
    return together
