"""Sum the partial column sums that kernels return."""

from collections.abc import Sequence

import torch


def sum_parts(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Sum partial column sums in a fixed order and round each once: the gradients of biases and norms.

    Args:
        parts: FP32 [parts, N], contiguous; the number of parts and N may differ between entries.
        dtype: of the results, a wide one.

    Returns:
        One tensor [N] of `dtype` for each of `parts`.
    """
    return [x.sum(0).to(dtype) for x in parts]
