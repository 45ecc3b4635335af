"""Warn about manual writes to a weight that rounding loses: an average kept in 16 or 8 bits stops moving, and nothing else shows it.

A weight of 16 or 8 bits rounds each write to the nearest value of its format. An exponential average moves by (1 - decay) of a difference
per step, far less than half a step of the format: it rounds back to where it was, at every step. Stochastic rounding would be right on
average, but at a decay of 0.9999 the result would still be off by a third. So keep averages in `msamp.float_copy`. These writes warn if
their rounding error is more than half of the change:

- in-place arithmetic (`lerp_`, `add_`), always;
- a copy of plain values (`copy_`, `.data =`) if the values are so close to the stored ones that they must have been computed from them. (A
  checkpoint or an average kept in FP32 is a quarter of a step away from its own rounding, on average.) Values computed in BF16 have lost
  the change before they are copied, and equal the stored ones.
"""

import contextlib
import contextvars
import warnings
from collections.abc import Iterator

import torch

from msamp.numerics.formats import Format

NEAR = 1 / 16  # limit of the mean change over abs(x) 2^-mantissa, which is about 0.18 for values not computed from the stored ones
LOADING: contextvars.ContextVar[bool] = contextvars.ContextVar("loading", default=False)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Context in which copies do not warn or reset scales: they come from a checkpoint, which may contain exactly the stored values."""
    token = LOADING.set(True)
    try:
        yield
    finally:
        LOADING.reset(token)


def warn_if_copy_lost(operation: str, fmt: Format, before: torch.Tensor, given: torch.Tensor, after: torch.Tensor) -> None:
    """Warn if copying plain values `given` that were computed from the stored ones changed these by less than half of what it should.
    `before` and `after` are the stored values in FP32, `given` of any float dtype and the same shape."""
    if LOADING.get() or not before.numel() or _capturing(before):
        return
    change = given.to(before.device, torch.float32) - before
    if given.dtype.itemsize == 2:
        step, size, stored = torch.finfo(given.dtype).eps, change.abs(), before.abs()
        # The second condition: an edit of a few elements is small compared with the sum, but not with the largest element.
        if size.sum() < NEAR * step * stored.sum() and size.max() < step * stored.max():
            warn_of_rounding(f"{operation} of {given.dtype} values that are almost those stored", fmt)
    elif change.abs().sum() < NEAR * 2.0**-fmt.mantissa_bits * before[change != 0].abs().sum():
        warn_if_lost(operation, fmt, before, before + change, after)


def warn_if_lost(operation: str, fmt: Format, before: torch.Tensor, wanted: torch.Tensor, after: torch.Tensor) -> None:
    """Warn if a write of `wanted` over `before` (FP32) that stored `after` rounds by more than half of its change. Waits for the device."""
    if not _capturing(before) and (after - wanted).abs().sum() > 0.5 * (wanted - before).abs().sum():
        warn_of_rounding(operation, fmt)


def warn_of_rounding(operation: str, fmt: Format) -> None:
    """Warn about a write whose change is too small for the format."""
    warnings.warn(
        f"{operation} stores into {fmt}, in steps of {2.0**-fmt.mantissa_bits:g} of a value: smaller changes are lost, and an average "
        "stops moving; keep averages in msamp.float_copy(model)",
        stacklevel=2,
    )


def warn_if_bits_are_lost(lost: torch.Tensor) -> None:
    """Warn if `lost`, bool 0-dim, is True: masters have only the bits of weights that were written or loaded. Waits for the device."""
    if not _capturing(lost) and lost:
        warnings.warn(
            "masters have only the bits of the weights that were loaded or written: load plain weights before msamp.initialize, those of a "
            "run from msamp.plain_state_dict(model, optimizer, torch.float32)",
            stacklevel=2,
        )


def _capturing(x: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured, so that the host cannot read a value."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
