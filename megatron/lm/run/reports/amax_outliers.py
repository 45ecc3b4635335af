"""Which scales of delayed scaling one large amax holds down.

With `max` over a window, one finite outlier sets a tensor's scale for as many steps as the window is long. The ordinary values of those
steps lose as many powers of two of the format's range as the outlier lies above them. `docs/guide/when_something_goes_wrong.md` has what
that costs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from msamp.nn.scaling_state import TensorScales

FACTOR = 2.0**6  # an amax so many times the median of the others in its window is an outlier


@torch.no_grad()
def bits_held_down(scales: TensorScales) -> Tensor:
    """By how many powers of two each row's scale would be larger if the outliers in its history had been ordinary.

    An outlier is an amax of more than `FACTOR` times the median of the other amaxes that are not 0.

    Args:
        scales: with a window.

    Returns:
        FP64 [rows] on the device of the histories, without a host sync; 0 for rows without an outlier, without a window of their own, or
        with a rule that no longer looks at the outlier.
    """
    history, top = scales.history, scales.history.argmax(-1, keepdim=True)
    others = history.scatter(-1, top, 0.0)
    median = others.masked_fill(others == 0, float("nan")).nanmedian(-1, keepdim=True).values
    ordinary = torch.where(history > FACTOR * median, median, history)  # with NaN, where there is no other, the comparison is False
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
    """Layer -> tensor -> `bits_held_down` of those above 0, over all ranks. Collective; the first rank has the result.

    Args:
        layers: of this rank: the layer's name in the whole model, its scales, and the names of its tensors by row.
        bits: by the layer's name, what `bits_held_down` gave for its rows.
    """
    mine: dict[str, dict[str, int]] = {}
    for name, _, tensors in layers:
        for row, lost in enumerate(bits[name]):
            if lost and row in tensors:
                mine.setdefault(name, {})[tensors[row]] = int(lost)
    ranks = torch.distributed.get_world_size()
    if ranks == 1:
        return mine
    everything: list[Any] | None = [None] * ranks if torch.distributed.get_rank() == 0 else None
    torch.distributed.gather_object(mine, everything)
    together: dict[str, dict[str, int]] = {}
    for name, tensors in (item for each in everything or () for item in each.items()):
        together.setdefault(name, {}).update(tensors)
    return together
