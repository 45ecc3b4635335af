"""Advantages of a policy's tokens, and control of its KL divergence from the reference."""

from dataclasses import dataclass

import torch


def advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation [Schulman et al. 2016, equation 16]: A_t = d_t + gamma lam A_{t+1} with
    d_t = r_t + gamma V_{t+1} - V_t; V and A are 0 after the last token of an answer.

    Args:
        rewards, values: FP32 [b, n].
        mask: bool [b, n], the tokens of answers, which are contiguous.
        gamma, lam: discount of rewards and lambda of GAE, 0 to 1.

    Returns:
        Advantages and returns (A + V), both FP32 [b, n] and 0 outside the mask.
    """
    held = torch.where(mask, values, 0)
    later_value = later = torch.zeros_like(held[:, 0])
    reversed_advantages = []
    for place in reversed(range(held.shape[1])):
        delta = rewards[:, place] + gamma * later_value - held[:, place]
        later = torch.where(mask[:, place], delta + gamma * lam * later, 0)
        later_value = held[:, place]
        reversed_advantages.append(later)
    gains = torch.stack(reversed_advantages[::-1], dim=1)
    return gains, torch.where(mask, gains + held, 0)


def whitened(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Normalize `x` to mean 0 and variance 1 over the mask, with 0 outside. FP32."""
    chosen = x[mask]
    variance, mean = torch.var_mean(chosen, correction=0)
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + 1e-8), 0)


@dataclass
class KLControl:
    """The coefficient of the KL penalty that is subtracted from the reward.

    Attributes:
        coefficient: current value.
        target: KL in nats per answer; the coefficient adapts with errors clipped to 20 % [Ziegler et al. 2019, section 2.2]. None keeps it
            constant.
        horizon: answers over which it adapts.
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
        """Adapt after a step with this mean divergence per answer, in nats."""
        if self.target is not None:
            error = min(max(divergence / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * answers / self.horizon
