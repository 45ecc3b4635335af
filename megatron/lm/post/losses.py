"""What is minimised after pre-training: cross-entropy of answers, DPO's loss, and PPO's two. All in FP32."""

import torch
from torch.nn import functional as F


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log probability of each token under the logits of its own place.

    Args:
        logits: [b, n, vocabulary], already those that predict `tokens`.
        tokens: [b, n] int64.
        temperature: that the tokens were sampled with.

    Returns:
        FP32 [b, n].
    """
    wide = logits.float() / temperature
    return -F.cross_entropy(wide.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)


def answer_loss(logits: torch.Tensor, tokens: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the tokens of answers.

    Args:
        logits: [b, s, vocabulary] of a causal model.
        tokens: [b, s] int64.
        answer: [b, s] bool, the tokens to be predicted, each from the one before; the first of a row is not looked at.

    Returns:
        FP32 0-dim: divide by the number of such tokens in the whole step.
    """
    chosen = answer[:, 1:]
    return F.cross_entropy(logits[:, :-1][chosen].float(), tokens[:, 1:][chosen], reduction="sum")


def answer_log_probs(logits: torch.Tensor, tokens: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """FP32 [b]: log probability of each row's answer, summed over its tokens; arguments as `answer_loss`."""
    return torch.where(answer[:, 1:], token_log_probs(logits[:, :-1], tokens[:, 1:]), 0).sum(-1)


def dpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, reference_chosen: torch.Tensor, reference_rejected: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Direct preference optimisation [Rafailov et al. 2023, equation 7].

    Args:
        chosen, rejected: [b] log probability of the answer under the policy, summed over its tokens.
        reference_chosen, reference_rejected: the same under the reference model.
        beta: how closely the policy is held to the reference.

    Returns:
        The loss [b], and the margin between the implicit rewards [b], beta ((chosen - reference) - (rejected - reference)).
    """
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return -F.logsigmoid(margin), margin


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of `x` where `mask` is true; 0 where it is nowhere."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def policy_loss(
    log_probs: torch.Tensor, before: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate, to be minimised [Schulman et al. 2017, equation 7].

    Args:
        log_probs: [b, n] of the tokens now.
        before: [b, n] when they were sampled.
        advantages: [b, n].
        mask: [b, n] bool, the tokens of answers.
        clip: ratios beyond 1 - clip and 1 + clip gain nothing more.

    Returns:
        The loss 0-dim, and the share of tokens with a clipped ratio.
    """
    ratio = torch.exp(torch.where(mask, log_probs - before, 0))
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)
    return masked_mean(torch.maximum(plain, clipped), mask), masked_mean((clipped > plain).float(), mask)


def value_loss(values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip: float) -> torch.Tensor:
    """Half the squared error of values, which may move by `clip` from what they were at sampling before they gain nothing more."""
    held = before + (values - before).clamp(-clip, clip)
    return 0.5 * masked_mean(torch.maximum((values - returns).square(), (held - returns).square()), mask)
