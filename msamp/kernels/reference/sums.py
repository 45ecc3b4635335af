"""Sum in FP32: partial column sums, and the payloads that the ranks of a group exchanged."""

from collections.abc import Sequence

import torch

from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import quantize


def sum_parts(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Sum partial column sums in a fixed order and round each once: the gradients of biases and norms.

    Args:
        parts: FP32 [parts, N], contiguous; the number of parts and N may differ between entries.
        dtype: of the results, a wide one.

    Returns:
        One tensor [N] of `dtype` for each of `parts`.
    """
    return [x.sum(0).to(dtype) for x in parts]


def sum_payloads(
    payloads: torch.Tensor, factor: torch.Tensor | None, dtype: torch.dtype, own: torch.Tensor | None = None, rank: int = 0
) -> torch.Tensor:
    """Sum payloads in FP32 in the order of the ranks, multiply the sum, and round it once (FP8-LM section 2.3).

    Args:
        payloads: [ranks, n], contiguous, of an FP8 or wide dtype: row r comes from rank r.
        factor: FP32, 0-dim: the payloads' scale_inv, or the scale of the sum; None is 1.
        dtype: of the result; an FP8 dtype saturates.
        own: [n], contiguous, of the dtype of `payloads`: read instead of row `rank`; None if all rows are present.
        rank: the row that `own` replaces.

    Returns:
        [n] of `dtype`.
    """
    parts = [own if own is not None and number == rank else payload for number, payload in enumerate(payloads)]
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part.float()
    if factor is not None:
        total *= factor
    return quantize(total, 1.0, of_dtype(dtype)) if dtype.itemsize == 1 else total.to(dtype)
