"""Cross entropy of logits over the vocabulary, and its gradient in their place."""

import torch


def cross_entropy_(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Loss of every row of `logits`, which are overwritten by the gradient of the weighted sum of the losses.

    That gradient is `weights[m] * (softmax(logits[m]) - onehot(labels[m]))`, so a row of weight 0 becomes zeros. What is not finite
    stays so, in the loss and in the row; a label outside the vocabulary makes both NaN, since no device can raise without a host sync.

    Args:
        logits: [M, V] FP32, BF16 or FP16, row-major, changed in place.
        labels: [M] int64, 0 to V - 1.
        weights: [M] FP32, the loss mask.

    Returns:
        losses [M] FP32 in nats: logsumexp(logits[m]) - logits[m, labels[m]], not weighted.
    """
    known = (labels >= 0) & (labels < logits.shape[1])
    at = labels.clamp(0, logits.shape[1] - 1)[:, None]
    log_p = torch.log_softmax(logits, 1, dtype=torch.float32)
    losses = -log_p.gather(1, at).squeeze(1)
    grad = log_p.exp_().scatter_add_(1, at, log_p.new_full((1, 1), -1.0).expand_as(at))
    logits.copy_(grad.mul_(weights.masked_fill(~known, torch.nan)[:, None]))
    return losses.masked_fill_(~known, torch.nan)
