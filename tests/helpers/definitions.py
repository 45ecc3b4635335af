"""Definitions that several tests compare with, and that no code runs."""

import torch

from msamp.numerics.block_scale import values
from msamp.numerics.formats import Format
from msamp.numerics.granularity import Granularity
from msamp.numerics.quantize import dequantize
from msamp.numerics.scaling import Scaling, scale_from_amax


class AmaxHistory:
    """The amax of the last steps of one tensor and the scale that follows: the definition of delayed scaling, one slot.

    An amax that is not finite enters as 0: its step is skipped, and in the window this amax would hold the scale for a whole window.

    `msamp.nn.scaling_state` keeps the same for all tensors of a model in flat arrays.

    Args:
        scaling: the rule.
        fmt: the format scaled into.
    """

    def __init__(self, scaling: Scaling, fmt: Format) -> None:
        self.scaling = scaling
        self.fmt = fmt
        self.amaxes: list[torch.Tensor] = []
        self.last: torch.Tensor | float = 1.0

    def step(self, amax: torch.Tensor) -> torch.Tensor:
        """The scale to quantise this step's tensor with, given its amax (FP32, 0-dim); then records the amax."""
        window = self.scaling.window
        if not window or len(self.amaxes) >= window:
            self.last = self.scaling.next_scale(torch.stack(self.amaxes or [amax]), self.fmt.max, self.last)
        else:
            self.last = scale_from_amax(amax, self.fmt.max, self.last)
        self.amaxes = [*self.amaxes, amax.masked_fill(~amax.isfinite(), 0.0)][-window:] if window else []
        return self.last


def dequantize_blocks(
    payload: torch.Tensor, scale_inv: torch.Tensor, granularity: Granularity, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The values of what `quantize_blocks` gave: `payload * scale_inv` in FP32, rounded once to `dtype`."""
    return dequantize(payload, granularity.spread(values(scale_inv), payload.shape), dtype)


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torch's grouped GEMM, which a CPU may not have; rows after the last group are 0."""
    ends = offs.tolist()
    parts = [a[start:end] @ b[e] for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])
