"""Transpose of an FP8 payload."""

import torch


def check_payload(x: torch.Tensor) -> None:
    """Raise a ValueError unless `x` is a matrix of 1-byte elements."""
    if x.ndim != 2 or x.element_size() != 1:
        raise ValueError(f"payload is {tuple(x.shape)} of {x.dtype}; transpose requires an FP8 matrix: cast it with cast_transpose")


def transpose(x: torch.Tensor) -> torch.Tensor:
    """Return the transpose [N, M], row-major, of a payload [M, N] of a 1-byte dtype, with unchanged codes.

    Raises:
        ValueError: if `x` is not such a matrix.
    """
    check_payload(x)
    return x.view(torch.uint8).t().contiguous().view(x.dtype)
