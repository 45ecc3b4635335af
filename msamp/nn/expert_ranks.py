"""Experts spread over ranks: which tokens a rank computes, and what the ranks send each other.

N ranks have E / N experts each, and T tokens each. A rank that needs the experts of others could send each of a token's top-k choices to
its expert's rank. Here every rank gets all N T tokens once, whatever k is, computes its own experts for them, adds a token's results
before they travel, and every rank gets the sum for its own tokens:

    forward     x [T, H] -> E4M3 -> all-gather [N T, H] -> own experts -> y_i [N T, H] -> reduce-scatter, FP32 sums -> y [T, H]
    backward    dy [T, H] -> E5M2 -> all-gather [N T, H] -> own experts -> dx_i [N T, H] -> reduce-scatter, FP32 sums -> dx [T, H]

The shapes depend on T and N only, so the host never waits and a CUDA graph holds the exchange. The router's probabilities and choices of
all ranks go with the tokens, 8 bytes per choice, and the gradients of the probabilities return. `ExpertRanks` is the interface;
`msamp.parallel.expert_parallel` implements it for a process group.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from msamp.nn.differentiable_once import differentiable_once


class ExpertRanks(Protocol):
    """The ranks that share the experts of a layer. All methods are collective.

    Attributes:
        ranks, rank: their number, and this one.
        fp8: whether tokens and gradients of FP8 experts travel in FP8, else in their own dtype; the bits of the results are the same.
        fp8_sums: whether the sums of FP8 experts travel in FP8 too, each rank's rounded once more before they are added.
    """

    ranks: int
    rank: int
    fp8: bool
    fp8_sums: bool

    def check_tokens(self, tokens: int) -> None:
        """Raise a ValueError unless every rank has this number of tokens, now and in every forward."""

    def shared_amax(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the maximum of `amax` (FP32 0-dim, changed in place) over the ranks, so that they share one scale."""

    def start_gather(self, rows: torch.Tensor, label: str) -> Callable[[], torch.Tensor]:
        """Start an all-gather of contiguous rows [T, ...]; the returned function waits for [N T, ...], in the order of the ranks."""

    def start_sum(
        self, partial: torch.Tensor, label: str, scale_inv: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Callable[[], torch.Tensor]:
        """Start the sum of the ranks' `partial` [N T, ...], codes with the shared `scale_inv` (FP32 0-dim) if it is given; the returned
        function waits for this rank's rows of the sum, [T, ...] in `dtype` (default: the dtype of `partial`), added in FP32 in rank order
        and rounded once."""


def gathered_routing(
    probs: torch.Tensor, experts: torch.Tensor, ranks: ExpertRanks, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the router's choices for the tokens of all ranks, as this rank's experts see them.

    Args:
        probs: FP32 [T, top-k].
        experts: integers [T, top-k], numbers of experts over all ranks; negative ones choose nothing.
        ranks: that share the experts.
        first, count: the first of this rank's experts, and their number.

    Returns:
        Probabilities FP32 [N T, top-k], whose gradient returns to their rank, and int32 [N T, top-k]: this rank's experts counted from 0,
        and -1 for the experts of others.
    """
    gathered, chosen = _Routing.apply(probs, experts, ranks)
    own = chosen - first
    return gathered, torch.where((own >= 0) & (own < count), own, -1)


class _Routing(torch.autograd.Function):
    """(probs, experts, ranks) -> both of all ranks, in one collective."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, experts: torch.Tensor, ranks: ExpertRanks) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        packed = torch.cat([probs.view(torch.int32), experts.to(torch.int32)], 1)
        both = ranks.start_gather(packed, "expert routing all-gather")()
        all_probs, chosen = (part.contiguous() for part in both.chunk(2, 1))
        ctx.ranks = ranks
        ctx.mark_non_differentiable(chosen)
        return all_probs.view(torch.float32), chosen

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return ctx.ranks.start_sum(grad.contiguous(), "expert probabilities reduce-scatter")(), None, None


class GatheredTokens(torch.autograd.Function):
    """(x [T, H], ranks) -> the tokens of all ranks [N T, H] in the dtype of x; the gradient of each token is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: ExpertRanks) -> torch.Tensor:  # type: ignore[override]
        ctx.ranks = ranks
        return ranks.start_gather(x.contiguous(), "expert tokens all-gather")()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.ranks.start_sum(grad.contiguous(), "expert grad_input reduce-scatter")(), None


class SummedTokens(torch.autograd.Function):
    """(partial [N T, H], ranks) -> this rank's tokens of the ranks' sum [T, H]; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, ranks: ExpertRanks) -> torch.Tensor:  # type: ignore[override]
        ctx.ranks = ranks
        return ranks.start_sum(partial.contiguous(), "expert output reduce-scatter")()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.ranks.start_gather(grad.contiguous(), "expert grad_output all-gather")(), None
