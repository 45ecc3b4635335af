"""Cross entropy of logits over the vocabulary, with the gradient written in place of the logits.

If tensor-parallel ranks each have some columns of the vocabulary, the softmax of a row requires three numbers from every rank: the largest
logit, the sum of exponentials relative to it, and the label's logit. `softmax_parts` computes a rank's own, and the ranks gather them.
`cross_entropy_of_parts_` then does what `cross_entropy_` does for whole rows. The losses are the same on every rank, bit for bit, since all
ranks combine the same numbers in the same order.
"""

import torch


def cross_entropy_(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the loss of every row of `logits`, and overwrite them with the gradient of the weighted sum of the losses.

    That gradient is `weights[m] * (softmax(logits[m]) - onehot(labels[m]))`, so a row of weight 0 becomes zeros. Non-finite logits give a
    non-finite loss and row. A label outside the vocabulary makes both NaN, since an exception would require a host sync.

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


def softmax_parts(logits: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
    """Compute one rank's part of the softmax of every row.

    Args:
        logits: [M, V] FP32, BF16 or FP16, row-major: columns `first` to `first + V - 1` of the whole vocabulary.
        labels: [M] int64, indices in the whole vocabulary.
        first: this rank's first column.

    Returns:
        [3, M] FP32: the largest logit (at least FP32's lowest finite value), the sum of exp(logit - largest), and the label's logit, or 0
        if another rank has it.
    """
    x = logits.float()
    at = labels - first
    own = (at >= 0) & (at < x.shape[1])
    picked = x.gather(1, at.clamp(0, x.shape[1] - 1)[:, None]).squeeze(1)
    largest = x.amax(1).clamp(min=torch.finfo(torch.float32).min)
    return torch.stack((largest, (x - largest[:, None]).exp_().sum(1), torch.where(own, picked, torch.zeros_like(picked))))


def cross_entropy_of_parts_(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, parts: torch.Tensor, first: int, source: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `cross_entropy_` for rows whose columns are sharded over ranks; this rank has `logits`.

    Args:
        logits: [M, V] FP32, BF16 or FP16, row-major, columns `first` to `first + V - 1`; overwritten by their part of the gradient.
        labels: [M] int64, 0 to ranks * V - 1; any other makes loss and gradient NaN.
        weights: [M] FP32, the loss mask.
        parts: [ranks, 3, M] FP32, `softmax_parts` of every rank in the order of the ranks.
        first: this rank's first column.
        source: the logits to read instead, of the same shape and dtype, row-major; then `logits` is only memory for their gradient.

    Returns:
        losses [M] FP32 in nats, bitwise the same on every rank.
    """
    V = logits.shape[1]
    known = (labels >= 0) & (labels < V * parts.shape[0])
    of_rank, sums, picked = parts.unbind(1)
    largest = of_rank.amax(0)
    log_total = (sums * (of_rank - largest).exp()).sum(0).log()
    losses = log_total - (picked.sum(0) - largest)
    at = labels - first
    own = (at >= 0) & (at < V)
    p = ((logits if source is None else source).float() - largest[:, None] - log_total[:, None]).exp_()
    p.scatter_add_(1, at.clamp(0, V - 1)[:, None], -own.float()[:, None])
    logits.copy_(p.mul_(weights.masked_fill(~known, torch.nan)[:, None]))
    return losses.masked_fill_(~known, torch.nan)
