"""mu, the factor that keeps FP8 sums over ranks from overflowing (FP8-LM section 2.1, equation 3)."""

from collections.abc import Sequence

import torch

MU_RULES = ("halve", "paper")
MU_MAX = 2.0
GROWTH = 4.0 ** (1 / 1000)  # 1,000 quiet steps lead from 1/2 to 2


def check_mu_rule(rule: str) -> None:
    """ValueError for a rule that is not one of `MU_RULES`."""
    if rule not in MU_RULES:
        raise ValueError(f"mu rule {rule!r} is unknown; choose one of {', '.join(MU_RULES)}")


def exceeds(counts: torch.Tensor, numel: torch.Tensor) -> torch.Tensor:
    """Where more than max(1, 0.001 % of the elements) are at the format's maximum: the lone maximum of a tensor does not count.

    Args:
        counts: int64 [n], elements of a payload at +-max.
        numel: int64 [n], elements of the tensors.

    Returns:
        bool [n]. In integers, because 0.001 % is no FP32 number.
    """
    return (counts > 1) & (counts * 100_000 > numel)


def next_mu(mu: torch.Tensor, exceeded: torch.Tensor, ranks: int, rule: str = "halve") -> torch.Tensor:
    """mu of the next step: lowered where the last one exceeded, else grown by `GROWTH` up to 2.

    Args:
        mu: FP64 [n].
        exceeded: bool [n], on the device of `mu`.
        ranks: data-parallel ranks N that a sum runs over.
        rule: "halve" lowers to max(mu / 2, 1 / (4 N)); "paper", equation 3 read literally, to 1/2.

    Returns:
        FP64 [n].

    Raises:
        ValueError: for an unknown rule.
    """
    check_mu_rule(rule)
    lowered = (mu / 2).clamp(min=1 / (4 * ranks)) if rule == "halve" else torch.full_like(mu, 0.5)
    return torch.where(exceeded, lowered, (mu * GROWTH).clamp(max=MU_MAX))


class AutoScale:
    """mu of n tensors, on their device and without a host sync.

    Args:
        numel: elements of each tensor, all ranks' pieces together.
        ranks: data-parallel ranks that a sum runs over.
        rule: one of `MU_RULES`.
        device: where mu lives.

    Attributes:
        mu: FP64 [n], 1 at first, always the same memory; a payload is FP8(mu s_g g) with mu rounded to FP32. FP64 because
            `GROWTH` in FP32, a thousand times over, is off by more than 1e-6.

    Raises:
        ValueError: for an unknown rule.
    """

    def __init__(self, numel: Sequence[int], ranks: int, rule: str = "halve", device: torch.device | str = "cpu") -> None:
        check_mu_rule(rule)
        self.numel = torch.tensor(numel, dtype=torch.int64, device=device)
        self.ranks = ranks
        self.rule = rule
        self.mu = torch.ones(len(numel), dtype=torch.float64, device=device)

    def update(self, local_counts: torch.Tensor, reduced_counts: torch.Tensor, valid: torch.Tensor) -> None:
        """Set mu for the next step.

        Args:
            local_counts: int64 [n], elements at +-max in the payload before the exchange, the largest over the ranks.
            reduced_counts: int64 [n], those in the sum, all pieces together.
            valid: bool [n]; mu stays where it is False (a tensor without a gradient, or with one that is not finite).
        """
        exceeded = exceeds(local_counts, self.numel) | exceeds(reduced_counts, self.numel)
        self.mu.copy_(torch.where(valid, next_mu(self.mu, exceeded, self.ranks, self.rule), self.mu))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of mu; the rule is configuration."""
        return {"mu": self.mu.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take mu from a state; ValueError where it was saved for another number of tensors."""
        if state["mu"].shape != self.mu.shape:
            raise ValueError(
                f"the saved mu has shape {tuple(state['mu'].shape)}, this model needs {tuple(self.mu.shape)}, one a tensor; "
                "load it into the model that it was saved from"
            )
        self.mu.copy_(state["mu"])
