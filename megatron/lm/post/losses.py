"""Losses of post-training, all in FP32: cross-entropy of answers, DPO's loss, and PPO's policy and value losses."""

import torch
from torch.nn import functional as F


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the log probability of each token under the logits at its own position.

    Args:
        logits: [b, n, vocabulary], already shifted to predict `tokens`.
        tokens: [b, n] int64.
        temperature: with which the tokens were sampled.

    Returns:
        FP32 [b, n].
    """
    wide = logits.float() / temperature
    return -F.cross_entropy(wide.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)


def answer_loss(logits: torch.Tensor, tokens: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy summed over the tokens of answers.

    Args:
        logits: [b, s, vocabulary] of a causal model.
        tokens: [b, s] int64.
        answer: [b, s] bool, the tokens to predict, each from those before it; the first of a row is ignored.

    Returns:
        FP32 0-dim: divide by the number of such tokens in the whole step.
    """
    chosen = answer[:, 1:]
    return F.cross_entropy(logits[:, :-1][chosen].float(), tokens[:, 1:][chosen], reduction="sum")


def answer_log_probs(logits: torch.Tensor, tokens: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Return the log probability of each row's answer, FP32 [b], summed over its tokens; arguments as `answer_loss`."""
    return torch.where(answer[:, 1:], token_log_probs(logits[:, :-1], tokens[:, 1:]), 0).sum(-1)


def dpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, reference_chosen: torch.Tensor, reference_rejected: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of direct preference optimization [Rafailov et al. 2023, equation 7].

    Args:
        chosen, rejected: [b], log probability of the answer under the policy, summed over its tokens.
        reference_chosen, reference_rejected: the same under the reference model.
        beta: strength of the KL constraint to the reference.

    Returns:
        The loss [b], and the margin between the implicit rewards [b], beta ((chosen - reference) - (rejected - reference)).
    """
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return -F.logsigmoid(margin), margin


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of `x` where `mask` is true; 0 if it is true nowhere."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def policy_loss(
    log_probs: torch.Tensor, before: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's clipped surrogate loss [Schulman et al. 2017, equation 7].

    Args:
        log_probs: [b, n], of the tokens under the current policy.
        before: [b, n], the same at sampling.
        advantages: [b, n].
        mask: [b, n] bool, the tokens of answers.
        clip: ratios are clipped to 1 - clip and 1 + clip.

    Returns:
        The loss, 0-dim, and the fraction of tokens with a clipped ratio.
    """
    ratio = torch.exp(torch.where(mask, log_probs - before, 0))
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)
    return masked_mean(torch.maximum(plain, clipped), mask), masked_mean((clipped > plain).float(), mask)


def value_loss(values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip: float) -> torch.Tensor:
    """Return half the squared error of values, clipped to within `clip` of the values at sampling."""
    held = before + (values - before).clamp(-clip, clip)
    return 0.5 * masked_mean(torch.maximum((values - returns).square(), (held - returns).square()), mask)
