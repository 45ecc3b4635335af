"""Transpose of an FP8 payload."""

import torch


def check_payload(x: torch.Tensor) -> None:
    """ValueError unless `x` is a matrix of 1-byte elements."""
    if x.ndim != 2 or x.element_size() != 1:
        raise ValueError(f"payload is {tuple(x.shape)} of {x.dtype}; transpose takes a matrix of an FP8 dtype: cast it with cast_transpose")


def transpose(x: torch.Tensor) -> torch.Tensor:
    """The transpose [N, M], row-major, of a payload [M, N] of a 1-byte dtype: every code unchanged.

    Raises:
        ValueError: for another number of dimensions or bytes.
    """
    check_payload(x)
    return x.view(torch.uint8).t().contiguous().view(x.dtype)
