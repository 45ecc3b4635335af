"""Gradient scaling before communication (FP8-LM section 2.1, equations 1 to 4; Figure 7).

Rank i sends the payload q_i = cast(factor * g_i). Every rank must use the same factor, or the payloads could not be summed. The factor
has two parts:

- s_g, the scale that all ranks share. Each rank proposes the scale for its own gradient, and the smallest proposal wins (equation 4): one
  MIN all-reduce of a few bytes per bucket. A proposal of -1 means a non-finite gradient, and +inf means no gradient at all, so under MIN
  the first wins over every scale and the second loses to it. A NaN would not do, because MIN over gloo drops it.
- headroom for the sum. N payloads that each fill the format overflow it when they are summed in that format. Figure 7 compares three ways
  to make room, `GRAD_SCALINGS`: "pre" divides by N before the sum, so small elements underflow; "post" divides after it, so large ones
  saturate; "auto" (equation 3) multiplies by mu, one factor per tensor, which drops as soon as elements saturate and grows slowly while
  none do. A sum in FP32 needs no headroom: its factor is s_g alone, which is what "post" computes.

An exchange lists which of the three it supports (`msamp.comm.exchange`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from msamp.kernels import ops
from msamp.kernels.tables import Tables
from msamp.numerics.formats import Format

NOT_FINITE, ABSENT = -1.0, float("inf")
_UNBOUNDED = 2.0**126  # proposed for an all-zero gradient, so that the other ranks' scales win

MU_RULES = ("halve", "paper")
MU_MAX = 2.0
GROWTH = 4.0 ** (1 / 1000)  # 1,000 steps without saturation take mu from 1/2 to 2


@dataclass(frozen=True)
class GradScaling:
    """One way to make headroom for a sum over N ranks.

    Attributes:
        name: its name in `--grad-scaling`.
        factor: (shared scales FP32 [n], N, mu FP64 [n] or None without mu) -> the factors from gradients to payloads, FP32 [n].
        adapts: whether mu adapts from step to step, by one of `MU_RULES`.
    """

    name: str
    factor: Callable[[torch.Tensor, int, torch.Tensor | None], torch.Tensor]
    adapts: bool = False


AUTO = GradScaling("auto", lambda scales, ranks, mu: scales * mu.float(), adapts=True)  # type: ignore[union-attr]
PRE = GradScaling("pre", lambda scales, ranks, mu: scales / ranks)
POST = GradScaling("post", lambda scales, ranks, mu: scales)
GRAD_SCALINGS = {scaling.name: scaling for scaling in (AUTO, PRE, POST)}


def check_grad_scaling(name: str) -> None:
    """Raise a ValueError if `name` is not one of `GRAD_SCALINGS`."""
    if name not in GRAD_SCALINGS:
        raise ValueError(f"gradient scaling {name!r} is unknown; choose one of {', '.join(GRAD_SCALINGS)}")


def propose_scales(
    gradients: Sequence[torch.Tensor | None], fmt: Format, device: torch.device, tables: Tables | None = None, plain: bool = False
) -> torch.Tensor:
    """Return this rank's proposal for each gradient, FP32 [n]: the scale for its own amax, NOT_FINITE, or ABSENT.

    Args:
        gradients: None where this rank has no gradient.
        fmt: of the payloads; for a format without scales the proposal is 1.
        device: of the gradients.
        tables: of the launch over them; None creates new ones.
        plain: also check gradients for non-finite values if the format has no scales.
    """
    present, tables = [g for g in gradients if g is not None], Tables(device) if tables is None else tables
    if present and (fmt.scaled or plain):
        amaxes = ops.grad_stats(tables, [g.contiguous() for g in present], squares=False)[0][0]
        scales = proposals_of(amaxes, fmt)
    else:
        scales = torch.ones(len(present), device=device, dtype=torch.float32)
    if len(present) == len(gradients):
        return scales
    proposals = torch.full((len(gradients),), ABSENT, device=device, dtype=torch.float32)
    # By a table: a capture refuses the copy of a list of indices from the host.
    return proposals.index_copy_(0, tables.send("present", [i for i, g in enumerate(gradients) if g is not None]), scales)


def proposals_of(amaxes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return `propose_scales` for gradients with these amaxes, FP32 [n], +inf for a non-finite gradient."""
    scales = ops.scale_from_amax(amaxes, fmt.max, None, _UNBOUNDED) if fmt.scaled else torch.ones_like(amaxes)
    return torch.where(amaxes < float("inf"), scales, NOT_FINITE)


def scales_of(proposals: torch.Tensor) -> torch.Tensor:
    """Return the proposals, with 1 where they are NOT_FINITE or ABSENT."""
    return proposals.abs().nan_to_num(posinf=1.0)  # two launches per bucket, since |NOT_FINITE| is already 1


def exceeds(counts: torch.Tensor, numel: torch.Tensor) -> torch.Tensor:
    """Return which tensors have more than max(1, 0.001 % of their elements) at the format's maximum.

    Args:
        counts: int64 [n], elements of a payload at +-max.
        numel: int64 [n], elements of the tensors.

    Returns:
        bool [n], computed in integers, because FP32 cannot represent 0.001 %.
    """
    return (counts > 1) & (counts * 100_000 > numel)


def next_mu(mu: torch.Tensor, exceeded: torch.Tensor, ranks: int, rule: str = "halve") -> torch.Tensor:
    """Return mu for the next step: lowered where `exceeded`, else multiplied by `GROWTH` up to 2.

    Args:
        mu: FP64 [n].
        exceeded: bool [n], on the device of `mu`.
        ranks: data-parallel ranks N that are summed over.
        rule: "halve" lowers mu to max(mu / 2, 1 / (4 N)); "paper", equation 3 read literally, to 1/2.

    Returns:
        FP64 [n].
    """
    lowered = (mu / 2).clamp(min=1 / (4 * ranks)) if rule == "halve" else torch.full_like(mu, 0.5)
    return torch.where(exceeded, lowered, (mu * GROWTH).clamp(max=MU_MAX))


class AutoScale:
    """mu of n tensors, kept on their device without a host sync.

    Args:
        numel: elements of each tensor, over all ranks' pieces.
        ranks: data-parallel ranks that are summed over.
        rule: one of `MU_RULES`.
        device: of mu.

    Attributes:
        mu: FP64 [n], 1 at first, always in the same memory; a payload is FP8(mu s_g g) with mu rounded to FP32. FP64, because a thousand
            multiplications by `GROWTH` in FP32 are off by more than 1e-6.

    Raises:
        ValueError: if the rule is unknown.
    """

    def __init__(self, numel: Sequence[int], ranks: int, rule: str = "halve", device: torch.device | str = "cpu") -> None:
        if rule not in MU_RULES:
            raise ValueError(f"mu rule {rule!r} is unknown; choose one of {', '.join(MU_RULES)}")
        self.numel = torch.tensor(numel, dtype=torch.int64, device=device)
        self.ranks = ranks
        self.rule = rule
        self.mu = torch.ones(len(numel), dtype=torch.float64, device=device)
        self._last = self.mu.clone()

    def update(self, local_counts: torch.Tensor, reduced_counts: torch.Tensor, valid: torch.Tensor) -> None:
        """Set mu for the next step.

        Args:
            local_counts: int64 [n], elements at +-max in the payload before the exchange, the maximum over the ranks.
            reduced_counts: int64 [n], elements at +-max in the sum, over all pieces.
            valid: bool [n]; where False (no gradient, or a non-finite one), mu does not change.
        """
        exceeded = exceeds(local_counts, self.numel) | exceeds(reduced_counts, self.numel)
        self._last.copy_(self.mu)
        self.mu.copy_(torch.where(valid, next_mu(self.mu, exceeded, self.ranks, self.rule), self.mu))

    def take_back_unless(self, usable: torch.Tensor) -> None:
        """Undo the last `update` if its step was skipped (`usable`, bool 0-dim on the device, is False), without a host sync.

        Saturated values are finite, so no step is skipped because mu is too large.
        """
        self.mu.copy_(torch.where(usable, self.mu, self._last))
