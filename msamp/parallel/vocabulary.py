"""The LM head and its cross entropy over a vocabulary with rows spread over tensor-parallel ranks.

Each rank holds W [V / T, h] and sees every token. Its logits are T-th parts of rows. The softmax of a row needs three FP32 numbers from
each rank: the largest logit, the sum of exponentials and the label's logit. They are gathered once a chunk. Everything else is as without
tensor parallelism (`msamp.nn.vocabulary_loss`): no more than a chunk of the logits is ever held, and gradients are computed in forward.

With sequence parallelism each rank starts from its own tokens, which are gathered in the compute dtype. The ranks' summands of their
gradient are added up, and each rank keeps those of its tokens.

megatron-core's vocabulary-parallel cross entropy copies all logits to FP32, passes over them five times and exchanges three times.
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
    """`linear_cross_entropy` with rank r's `weight` being rows r V to (r + 1) V - 1 of the head.

    Args:
        hidden: [T, h] FP32, BF16 or FP16: all tokens, the same on every rank, or with `sequence_parallel` this rank's, the same number
            on each.
        weight: [V, h], of the same dtype.
        labels: [all tokens] int64, numbered in the whole vocabulary.
        weights: [all tokens] FP32, the loss mask.
        peers: the tensor-parallel ranks.
        sequence_parallel: whether the tokens are spread over the ranks.
        chunk_bytes: about so many bytes of logits are held at a time; None: as `linear_cross_entropy` has it.
        precision: as `linear_cross_entropy` has it; each rank's shard of the weight has a scale of its own.

    Returns:
        The sum of `weights * losses`, FP32 0-dim, with gradient to `hidden` and `weight`; and the losses, FP32 in nats, without. Both
        bitwise the same on every rank. The backward of each rank must start from the same gradient of the sum.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    first = peers.rank * weight.shape[0]

    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        own = ops.softmax_parts(logits, labels, first)
        parts = peers.all_gather(own.view(-1), [own.numel()] * peers.ranks, "the parts of a softmax", KIND, WHAT + "softmax all-gather")
        return ops.cross_entropy_of_parts_(logits, labels, weights, parts.view(peers.ranks, *own.shape), first)

    whole = _OfAllRanks.apply(hidden, peers, sequence_parallel)  # type: ignore[no-untyped-call]
    return linear_cross_entropy(whole, weight, labels, weights, chunk_bytes, cross_entropy, precision=precision)


class _OfAllRanks(torch.autograd.Function):
    """Gathers rows, or passes on rows that all ranks have; in backward the ranks' gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peers: Peers, sequence_parallel: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.peers, ctx.scatter = peers, sequence_parallel
        if not sequence_parallel:
            return x.view_as(x)
        return start_gather(x.contiguous(), peers, WHAT + "input all-gather").keep()  # the graph holds it until backward

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return start_sum(grad.contiguous(), ctx.peers, WHAT + "grad_input", scatter=ctx.scatter)(), None, None
