"""How a gradient is scaled before it travels (FP8-LM section 2.1, equations 1 to 4; Figure 7).

A payload of rank i is q_i = cast(factor * g_i), and every rank must use the same factor, or the payloads could not be added up.
The factor has two parts:

- s_g, the scale that all ranks share. Each rank proposes the scale that its own gradient asks for, and the smallest proposal
  holds (equation 4): one MIN all-reduce of a few bytes a bucket. A proposal also tells what no scale can: -1 is a gradient that
  is not finite, +inf is no gradient at all. MIN lets the first win over every scale and the second lose to it; a NaN would be
  dropped by MIN over gloo.
- room for the sum. N payloads that each fill the format overflow it when they are added up in that format. Figure 7 compares
  three ways to make room, `GRAD_SCALINGS`: "pre" divides by N before the sum, and small elements vanish; "post" divides after
  it, and large ones saturate; "auto" (equation 3) multiplies by mu, one factor a tensor, which falls as soon as elements
  saturate and grows slowly while none do. A sum in FP32 needs no room: its factor is s_g alone, which is what "post" computes.

An exchange names those of the three that it takes (`msamp.comm.exchange`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from msamp.kernels import ops
from msamp.kernels.tables import Tables
from msamp.numerics.formats import Format

NOT_FINITE, ABSENT = -1.0, float("inf")
_UNBOUNDED = 2.0**126  # an all-zero gradient asks for nothing: the other ranks' scale holds

MU_RULES = ("halve", "paper")
MU_MAX = 2.0
GROWTH = 4.0 ** (1 / 1000)  # 1,000 quiet steps lead from 1/2 to 2


@dataclass(frozen=True)
class GradScaling:
    """One way to make room for a sum over N ranks.

    Attributes:
        name: what `--grad-scaling` calls it.
        factor: from the shared scales FP32 [n], N, and mu FP64 [n] (None where nothing adapts) to what multiplies gradients into
            their payloads, FP32 [n].
        adapts: whether mu goes on from step to step, by one of `MU_RULES`.
    """

    name: str
    factor: Callable[[torch.Tensor, int, torch.Tensor | None], torch.Tensor]
    adapts: bool = False


def _auto(scales: torch.Tensor, ranks: int, mu: torch.Tensor | None) -> torch.Tensor:
    assert mu is not None
    return scales * mu.float()


AUTO = GradScaling("auto", _auto, adapts=True)
PRE = GradScaling("pre", lambda scales, ranks, mu: scales / ranks)
POST = GradScaling("post", lambda scales, ranks, mu: scales)
GRAD_SCALINGS = {scaling.name: scaling for scaling in (AUTO, PRE, POST)}


def check_grad_scaling(name: str) -> None:
    """ValueError for a name that is not one of `GRAD_SCALINGS`."""
    if name not in GRAD_SCALINGS:
        raise ValueError(f"gradient scaling {name!r} is unknown; choose one of {', '.join(GRAD_SCALINGS)}")


def propose_scales(
    gradients: Sequence[torch.Tensor | None], fmt: Format, device: torch.device, tables: Tables | None = None, plain: bool = False
) -> torch.Tensor:
    """What this rank proposes for each gradient, FP32 [n]: the scale by its own amax, or NOT_FINITE, or ABSENT.

    Args:
        gradients: None where this rank has none.
        fmt: of the payloads; a format without scales proposes 1.
        device: of the gradients.
        tables: of the launch over them; None makes new ones.
        plain: with a format without scales, read the gradients too, to see those that are not finite.
    """
    present = [g for g in gradients if g is not None]
    if present and (fmt.scaled or plain):
        amaxes = ops.grad_stats(tables or Tables(device), [g.contiguous() for g in present], squares=False)[0][0]
        scales = proposals_of(amaxes, fmt)
    else:
        scales = torch.ones(len(present), device=device, dtype=torch.float32)
    if len(present) == len(gradients):
        return scales
    proposals = torch.full((len(gradients),), ABSENT, device=device, dtype=torch.float32)
    proposals[[i for i, g in enumerate(gradients) if g is not None]] = scales
    return proposals


def proposals_of(amaxes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`propose_scales` of gradients with these amaxes, FP32 [n], +inf for one that is not finite."""
    scales = ops.scale_from_amax(amaxes, fmt.max, None, _UNBOUNDED) if fmt.scaled else torch.ones_like(amaxes)
    return torch.where(amaxes < float("inf"), scales, NOT_FINITE)


def scales_of(proposals: torch.Tensor) -> torch.Tensor:
    """The proposals, with 1 where they are no scale."""
    return proposals.abs().nan_to_num(posinf=1.0)  # two launches a bucket: |NOT_FINITE| is 1 already


def check_mu_rule(rule: str) -> None:
    """ValueError for a rule that is not one of `MU_RULES`."""
    if rule not in MU_RULES:
        raise ValueError(f"mu rule {rule!r} is unknown; choose one of {', '.join(MU_RULES)}")


def exceeds(counts: torch.Tensor, numel: torch.Tensor) -> torch.Tensor:
    """Which tensors have more than max(1, 0.001 % of the elements) at the format's maximum; a single one does not count.

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
        self._last = self.mu.clone()

    def update(self, local_counts: torch.Tensor, reduced_counts: torch.Tensor, valid: torch.Tensor) -> None:
        """Set mu for the next step.

        Args:
            local_counts: int64 [n], elements at +-max in the payload before the exchange, the largest over the ranks.
            reduced_counts: int64 [n], those in the sum, all pieces together.
            valid: bool [n]; mu stays where it is False (a tensor without a gradient, or with one that is not finite).
        """
        exceeded = exceeds(local_counts, self.numel) | exceeds(reduced_counts, self.numel)
        self._last.copy_(self.mu)
        self.mu.copy_(torch.where(valid, next_mu(self.mu, exceeded, self.ranks, self.rule), self.mu))

    def take_back_unless(self, usable: torch.Tensor) -> None:
        """Undo the last `update` where its step was skipped (`usable`: bool 0-dim on the device, False), without a host sync.

        What saturates stays finite, so that no step is skipped because mu is too large.
        """
        self.mu.copy_(torch.where(usable, self.mu, self._last))
