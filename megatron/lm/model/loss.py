"""Cross entropy over a vocabulary that may be split across tensor-parallel ranks, and its mean over a micro-batch."""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from megatron.lm.processes.grid import ALONE, Ranks


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of every token, in nats, computed in FP32.

    Args:
        logits: [s, b, padded vocabulary / tensor-parallel size], any floating dtype; FP32 logits are overwritten.
        labels: [b, s] int64, less than the size of the whole vocabulary.

    Returns:
        [b, s] FP32.
    """
    # In place on one FP32 copy of the logits, the largest tensor of the step; torch's cross entropy keeps three of them.
    return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t()


def mean_loss(loss_sum: Tensor, loss_mask: Tensor, context: Ranks = ALONE) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of a micro-batch in the two-value form that megatron-core's schedules require of a loss function.

    The schedule divides the first value by the number of micro-batches and runs backward from it, so that gradients are the mean over
    micro-batches of the mean over counted tokens. Pass `functools.partial(mean_loss, loss_mask=mask)`.

    Args:
        loss_sum: FP32 0-dim, the sum over counted tokens that GPT.forward returns.
        loss_mask: [b, s] FP32, 1 where the token counts, 0 where it does not.
        context: the ranks that have the parts of the same sequences; by default this rank has whole sequences. Each rank divides its own
            sum by the mean count of these ranks, so that the average of their results, and of their gradients, is the mean over the
            sequences.

    Returns:
        The mean, a scalar with gradient (0 if no token counts; if it is non-finite, all gradients are NaN), and for the log
        `{"loss_sum", "tokens"}`: scalars without gradient, whose sums over micro-batches and data-parallel ranks give the exact mean over
        all counted tokens.
    """
    tokens = loss_mask.sum()
    if context.size == 1:
        mean = loss_sum / tokens.clamp(min=1)
    else:
        counted = tokens.clone()
        dist.all_reduce(counted, group=context.group)
        mean = loss_sum * context.size / counted.clamp(min=1)
    # An infinite loss may have finite gradients. Making them NaN lets every rank skip the step; a factor of 1 changes no bit.
    mean = mean * torch.ones_like(mean).masked_fill(~mean.isfinite(), torch.nan)
    return mean, {"loss_sum": loss_sum.detach(), "tokens": tokens.detach()}
