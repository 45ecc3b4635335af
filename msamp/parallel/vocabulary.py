"""The vocabulary-parallel LM head and its cross entropy.

Each of T tensor-parallel ranks has W [V / T, h] and computes its columns of the logits for every token. The softmax of a row requires three
FP32 numbers from each rank: the largest logit, the sum of exponentials and the label's logit. They are gathered once per chunk. Everything
else is the same as without tensor parallelism (`msamp.nn.vocabulary_loss`): only one chunk of logits exists at a time, and gradients are
computed in forward.

With sequence parallelism each rank starts from its own tokens, which are gathered in the compute dtype. In backward the ranks' partial
gradients are reduce-scattered.

megatron-core's vocabulary-parallel cross entropy copies all logits to FP32, reads them five times and communicates three times.
"""

from typing import Any

import torch

from msamp.comm.collectives import Peers
from msamp.kernels import ops
from msamp.nn.differentiable_once import differentiable_once
from msamp.nn.vocabulary_loss import COMPUTE, linear_cross_entropy
from msamp.parallel.sequence_parallel import KIND, start_gather, start_sum

WHAT = "LM head "


def vocabulary_parallel_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    peers: Peers,
    *,
    sequence_parallel: bool,
    chunk_bytes: int | None = None,
    precision: str = COMPUTE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `linear_cross_entropy`, where rank r's `weight` contains rows r V to (r + 1) V - 1 of the head.

    Args:
        hidden: [T, h] FP32, BF16 or FP16: all tokens, the same on every rank; with `sequence_parallel` this rank's tokens, the same number
            on each rank.
        weight: [V, h], of the same dtype.
        labels: [all tokens] int64, indices in the whole vocabulary.
        weights: [all tokens] FP32, the loss mask.
        peers: the tensor-parallel ranks.
        sequence_parallel: whether the tokens are split over the ranks.
        chunk_bytes: as in `linear_cross_entropy`.
        precision: as in `linear_cross_entropy`; each rank's shard of the weight has its own scale.

    Returns:
        The sum of `weights * losses`, FP32 0-dim, differentiable in `hidden` and `weight`; and the losses, FP32 in nats, detached. Both are
        bitwise the same on every rank. The backward of every rank must start from the same gradient of the sum.

    Raises:
        ValueError: if shapes or dtypes do not match.
    """
    first = peers.rank * weight.shape[0]

    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        own = ops.softmax_parts(logits, labels, first)
        parts = peers.all_gather(own.view(-1), [own.numel()] * peers.ranks, "the parts of a softmax", KIND, WHAT + "softmax all-gather")
        return ops.cross_entropy_of_parts_(logits, labels, weights, parts.view(peers.ranks, *own.shape), first)

    whole = _OfAllRanks.apply(hidden, peers, sequence_parallel)  # type: ignore[no-untyped-call]
    return linear_cross_entropy(whole, weight, labels, weights, chunk_bytes, cross_entropy, precision=precision)


class _OfAllRanks(torch.autograd.Function):
    """Gather rows, or return rows that all ranks have; in backward sum the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peers: Peers, sequence_parallel: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.peers, ctx.scatter = peers, sequence_parallel
        if not sequence_parallel:
            return x.view_as(x)
        return start_gather(x.contiguous(), peers, WHAT + "input all-gather").keep()  # autograd keeps it until backward

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return start_sum(grad.contiguous(), ctx.peers, WHAT + "grad_input", scatter=ctx.scatter)(), None, None
