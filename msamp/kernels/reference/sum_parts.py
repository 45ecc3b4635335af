"""Sums over rows that a kernel has left in parts."""

from collections.abc import Sequence

import torch


def sum_parts(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Add up partial column sums, always in the same order, and round each once: the gradients of biases and norms.

    Args:
        parts: FP32 [parts, N] each, contiguous, with parts and N of its own.
        dtype: of the results, a wide one.

    Returns:
        One tensor [N] of `dtype` for each of `parts`.
    """
    return [x.sum(0).to(dtype) for x in parts]
