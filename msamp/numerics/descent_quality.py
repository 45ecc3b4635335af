"""How much of an update reaches the parameters: Collage's effective descent quality (EDQ) and lost arithmetic, and the undelivered share.

A weight in few bits rounds away updates far below its last digit. EDQ measures what is left along the update's direction, lost arithmetic
counts the elements that did not move, and the undelivered share says how much of the distance is missing, which alone is about 0 if
stochastic rounding delivers the update on average.
"""

import math

import torch


def edq(update: torch.Tensor, effective: torch.Tensor) -> float:
    """Effective descent quality, <update / |update|, effective> in FP64 [Collage, definition 3.3, equation 3].

    Its best value is the norm of the update. For a zero update it is 0.

    Args:
        update: the update that the optimizer computed in its own arithmetic, before it is added (the paper's equation 1); any shape. Along
            the update in FP32 from the same states, the result includes what the optimizer loses while it computes its update.
        effective: the actual change of the parameters (equation 2), same shape.
    """
    update, effective = update.double().flatten(), effective.double().flatten()
    norm = float(update.norm())
    return float(torch.dot(update, effective)) / norm if norm else 0.0


def lost_frac(update: torch.Tensor, effective: torch.Tensor) -> float:
    """Lost arithmetic: the share of parameters that a non-zero update leaves unchanged [Collage]."""
    return float(((update != 0) & (effective == 0)).double().mean())


def undelivered_frac(update: torch.Tensor, effective: torch.Tensor) -> float:
    """Share of an update that did not reach the parameters, in [0, 1]: 1 - sum sign(update) effective / sum |update|, in FP64.

    `lost_frac` counts the elements that did not move. With stochastic rounding that is most of them, although the update arrives on
    average. This metric is a mean over the elements: 0 for unbiased rounding, up to noise that shrinks with their number, and for nearest
    rounding the share that is lost for good, if the parameters are already stored values. It is 0 for a zero update.

    Args:
        update: the update in FP32, any shape.
        effective: the actual change of the parameters, same shape.
    """
    update, effective = update.double(), effective.double()
    return undelivered_share(float(update.abs().sum()), float((update.sign() * effective).sum()))


def undelivered_share(distance: float, arrived: float) -> float:
    """`undelivered_frac` from its two sums: of |update|, and of sign(update) times the actual change. NaN if either is NaN."""
    share = 1.0 - arrived / distance if distance else 0.0
    return share if math.isnan(share) else min(1.0, max(0.0, share))
