"""Cross entropy over a vocabulary that may be split across tensor-parallel ranks, and its mean over a micro-batch."""

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of every token, in nats, computed in FP32.

    Args:
        logits: [s, b, padded vocabulary / tensor-parallel size], any floating dtype; FP32 logits are overwritten.
        labels: [b, s] int64, below the whole vocabulary's size.

    Returns:
        [b, s] FP32.
    """
    # Works in place on one FP32 copy of the logits, the largest tensor of the step; torch's own cross entropy holds three of them.
    return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t()


def mean_loss(loss_sum: Tensor, loss_mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss of a micro-batch, as megatron-core's schedules want it of a loss function (their two-value form).

    The schedule divides the first value by the number of micro-batches and runs backward from it, so that gradients are the mean over
    micro-batches of the mean over counted tokens. Give it `functools.partial(mean_loss, loss_mask=mask)`.

    Args:
        loss_sum: FP32 0-dim, the sum over counted tokens, as GPT.forward returns it.
        loss_mask: [b, s] FP32, 1 where the token counts, 0 where it does not.

    Returns:
        The mean, a scalar with gradient (0 when no token counts; where it is not finite, all gradients are NaN), and for the log
        `{"loss_sum", "tokens"}`: scalars without gradient; their sums over micro-batches and data-parallel ranks give the exact mean
        over all counted tokens.
    """
    tokens = loss_mask.sum()
    mean = loss_sum / tokens.clamp(min=1)
    # An infinite loss may have finite gradients. With these made NaN every rank skips the step; a factor of 1 changes no bit.
    mean = mean * torch.ones_like(mean).masked_fill(~mean.isfinite(), torch.nan)
    return mean, {"loss_sum": loss_sum.detach(), "tokens": tokens.detach()}
