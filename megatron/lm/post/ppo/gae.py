"""Advantages of a policy's tokens, and how far the policy may move from its reference."""

from dataclasses import dataclass

import torch


def advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation [Schulman et al. 2016, equation 16]: A_t = d_t + gamma lam A_{t+1}, where
    d_t = r_t + gamma V_{t+1} - V_t; behind the last token of an answer both V and A are 0.

    Args:
        rewards, values: FP32 [b, n].
        mask: bool [b, n], the tokens of answers, which lie side by side.
        gamma, lam: discounts of rewards and of their estimates, 0 to 1.

    Returns:
        Advantages and returns, A + V, both FP32 [b, n] and 0 outside of the mask.
    """
    held = torch.where(mask, values, 0)
    later_value = later = torch.zeros_like(held[:, 0])
    found = []
    for place in reversed(range(held.shape[1])):
        delta = rewards[:, place] + gamma * later_value - held[:, place]
        later = torch.where(mask[:, place], delta + gamma * lam * later, 0)
        later_value = held[:, place]
        found.append(later)
    gains = torch.stack(found[::-1], dim=1)
    return gains, torch.where(mask, gains + held, 0)


def whitened(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`x` with mean 0 and variance 1 over the mask; 0 outside of it. FP32."""
    chosen = x[mask]
    variance, mean = torch.var_mean(chosen, correction=0)
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + 1e-8), 0)


@dataclass
class KLControl:
    """The coefficient by which the divergence from the reference is taken off the reward.

    Attributes:
        coefficient: of now.
        target: nats an answer; the coefficient follows, by at most 20 % of `share` a step [Ziegler et al. 2019, section 2.2]. None: it
            stays.
        horizon: answers over which it follows.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient < float("inf"):
            raise ValueError(f"--kl-coef {self.coefficient} is out of range: give 0 or more")
        if self.target is not None and not 0 < self.target < float("inf"):
            raise ValueError(f"--kl-target {self.target} is out of range: give more than 0, or leave it out for a fixed coefficient")

    def update(self, divergence: float, answers: int) -> None:
        """After a step with this mean divergence an answer, in nats."""
        if self.target is not None:
            error = min(max(divergence / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * answers / self.horizon
