"""The FP32 sum of the payloads that the ranks of a group have sent each other."""

import torch

from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import quantize


def sum_payloads(
    payloads: torch.Tensor, factor: torch.Tensor | None, dtype: torch.dtype, own: torch.Tensor | None = None, rank: int = 0
) -> torch.Tensor:
    """Add up payloads in FP32 in the order of the ranks, multiply the sum, and round it once (FP8-LM section 2.3).

    Args:
        payloads: [ranks, n], contiguous, of an FP8 or wide dtype: row r is what rank r has sent.
        factor: FP32, 0-dim: the payloads' scale_inv, or what the sum is scaled with; None is 1.
        dtype: of the result; an FP8 dtype saturates.
        own: [n], contiguous, of the dtype of `payloads`: read in place of row `rank`; None: all rows are there.
        rank: the row that `own` replaces.

    Returns:
        [n] of `dtype`.

    Raises:
        ValueError: payloads of another shape, or an `own` that is not like a row.
    """
    check_payloads(payloads, own, rank)
    parts = [own if own is not None and number == rank else payload for number, payload in enumerate(payloads)]
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part.float()
    if factor is not None:
        total *= factor
    return quantize(total, 1.0, of_dtype(dtype)) if dtype.itemsize == 1 else total.to(dtype)


def check_payloads(payloads: torch.Tensor, own: torch.Tensor | None, rank: int) -> None:
    """ValueError where they are not rows of equal length, or `own` cannot stand for row `rank`."""
    if payloads.ndim != 2 or not len(payloads) or not payloads.is_contiguous():
        raise ValueError(f"payloads are {tuple(payloads.shape)}; they must be [ranks, n], contiguous, of at least one rank: stack them")
    if own is not None and not (own.shape == payloads.shape[1:] and own.dtype == payloads.dtype and 0 <= rank < len(payloads)):
        raise ValueError(
            f"own is {own.dtype} {tuple(own.shape)} of rank {rank}; it must be {payloads.dtype} {tuple(payloads.shape[1:])} of a rank "
            f"below {len(payloads)}: pass the slice that this rank has not sent"
        )
