"""Rounding statistics of casts and updates: the sums for the log line and the precision recorder."""

import torch

from msamp.numerics.formats import of_dtype

CHUNK = 2**23  # elements read at a time, with three FP64 temporaries of 64 MiB


@torch.no_grad()
def count_(row: torch.Tensor, x: torch.Tensor, payload: torch.Tensor) -> None:
    """Add three counts to `row`: non-zero elements of `x`, elements of `payload` at its format's maximum, and non-zero elements of `x` that
    are zero in `payload`. It takes one read of both, without a host sync. A NaN counts as non-zero.

    Args:
        row: int64 [3], contiguous, changed in place.
        x: any format, of any shape.
        payload: any format, as many elements in the same order.
    """
    limit = of_dtype(payload.dtype).max
    for part, stored in zip(x.reshape(-1).split(CHUNK), payload.reshape(-1).split(CHUNK), strict=True):
        nonzero, codes = part.float() != 0, stored.float()
        row += torch.stack([nonzero.sum(), (codes.abs() == limit).sum(), (nonzero & (codes == 0)).sum()])


@torch.no_grad()
def tally_(row: torch.Tensor, x: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor) -> None:
    """Add the statistics of a cast from `x` to `payload` to `row`: one read of both, without a host sync (for CUDA graphs).

    Args:
        row: FP64 [8], `msamp.numerics.metrics.TALLY`, changed in place: counts of elements, of non-zero ones, of non-zero ones that are
            zero in the payload, of elements at the format's maximum; sums of x^2 and of (x - payload * scale_inv)^2; the running amax of
            x; the scale of this call.
        x: FP32, BF16 or FP16, of any shape.
        payload: any format, with the same number and order of elements.
        scale_inv: FP32 0-dim; this twin also accepts a tensor that broadcasts against `x`, and records the smallest scale.
    """
    limit = of_dtype(payload.dtype).max
    if not x.numel():
        return
    flat = x.reshape(-1).split(CHUNK)
    scales = scale_inv.expand(x.shape).reshape(-1).split(CHUNK) if scale_inv.dim() else [scale_inv] * len(flat)
    for part, stored, inv in zip(flat, payload.reshape(-1).split(CHUNK), scales, strict=True):
        values, codes = part.double(), stored.float()
        nonzero = values != 0
        counts = (nonzero, nonzero & (codes == 0), codes.abs() == limit)
        noise = (codes.double() * inv - values).square().sum()
        row[1:6] += torch.stack([*(mask.sum(dtype=torch.float64) for mask in counts), values.square().sum(), noise])
        row[6] = torch.maximum(row[6], values.abs().amax())
    row[0] += x.numel()
    row[7] = 1 / scale_inv.double().amax()


@torch.no_grad()
def tally_update_(row: torch.Tensor, before: torch.Tensor, wanted: torch.Tensor, stored: torch.Tensor, scale_inv: torch.Tensor) -> None:
    """Add the statistics of a stored update to `row`, in one read and without a host sync.

    `edq`, `lost_frac` and `undelivered_share` of `msamp.numerics.metrics` follow from them.

    Args:
        row: FP64 [7], changed in place: number of elements; sums of stored^2, of update^2 and of update times stored change; number of
            elements that a non-zero update leaves unchanged; sums of |update| and of sign(update) times stored change.
        before: FP32 values of the master, of any shape.
        wanted: FP32 values after the update, before they are stored.
        stored: the stored payload in any format, with the same number and order of elements.
        scale_inv: FP32 0-dim, of `stored`.
    """
    for old, new, kept in zip(*(x.reshape(-1).split(CHUNK) for x in (before, wanted, stored)), strict=True):
        start, after = old.double(), kept.float().double() * scale_inv
        update, effective = new.double() - start, after - start
        lost = ((update != 0) & (effective == 0)).sum(dtype=torch.float64)
        along = (update.sign() * effective).sum()
        row[1:] += torch.stack([after.square().sum(), update.square().sum(), (update * effective).sum(), lost, update.abs().sum(), along])
    row[0] += before.numel()
