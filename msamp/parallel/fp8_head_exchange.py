"""FP8 attention of some heads of whole sequences: `msamp.nn.fp8_attention` between the all-to-alls of `msamp.parallel.head_exchange`.

What the all-to-alls carry are the FP8 codes that the kernels read and write, a byte per element, so nothing is rounded that one process
would not round:

    forward    queries, keys, values     E4M3    cast by the rank of their tokens
               output                    E4M3    cast in the kernel; at its own rank it is the projection's operand
    backward   output                    E4M3    once more, so that a rank need not keep it in both layouts
               gradient of the output    E5M2    cast by the rank of its tokens
               gradients of q, k, v      E5M2    cast in the kernel

The scales are the same as on one process. Delayed scales are the same on all ranks. Just-in-time scales, of the first steps, follow from
the largest amax of all ranks: the ranks agree on amaxes before a cast, and between the two runs of the backward kernel. Two ranks' scales
would not do: the kernels take one scale per tensor. A rank whose tensor is all zero has no scale, and uses the others'.

Given the same rotated queries, keys and values, output and gradients therefore equal one process's, bit for bit where the kernels are
deterministic. For a query, a key and its value a rank sends half of the bytes of `HeadExchange` in BF16, and the output once more.

A scale_inv that is NaN, since a tensor is not finite, travels with the codes and is NaN on all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from msamp.comm.collectives import Peers
from msamp.kernels import ops
from msamp.kernels.reference.fp8_attention import AttentionScales
from msamp.nn.fp8_attention import GRAD, Attended, FP8Attention, Gradients, Operands
from msamp.parallel.head_exchange import check_divisible, to_heads, to_tokens
from msamp.parallel.ring_attention import KIND


@dataclass(frozen=True)
class FP8HeadExchange(FP8Attention):
    """`FP8Attention` whose heads are divided between the ranks that share the sequences.

    `exchange` returns the operands of this rank's heads, [ranks * s, b, heads / ranks, d], which `attend` and `gradients` take; what they
    return, and the output's gradient, is of all heads of this rank's s tokens.

    Attributes:
        peers: the ranks, in the order of their chunks (`msamp.parallel.ring_attention`).
    """

    peers: Peers

    def first_scales(self, measure: Callable[[], torch.Tensor], fp_max: float) -> torch.Tensor | None:
        """Return just-in-time scales, FP32 [k], from the largest of all ranks' amaxes."""
        return ops.scale_from_amax(self._agree(measure()), fp_max, None, 1.0)

    def _agree(self, amaxes: torch.Tensor) -> torch.Tensor:
        return self.peers.all_reduce(amaxes.clone(), dist.ReduceOp.MAX, "amaxes of attention", KIND, "amaxes all-reduce")

    def exchange(self, of: Operands) -> Operands:
        """Return the operands of this rank's heads of all tokens.

        Raises:
            ValueError: if the heads or the groups cannot be divided between the ranks, or the number of tokens is odd.
        """
        check_divisible(self.peers.ranks, of.query.shape[0], of.query.shape[2], of.key.shape[2])
        (query, key, value), scale_invs = to_heads(self.peers, of[:3], of.scale_invs)
        return Operands(query, key, value, scale_invs.amax(0))

    def attend(self, of: Operands) -> Attended:
        """Compute the output of this rank's heads; `o` of the result covers this rank's tokens, `stats` its heads."""
        attended = self.attend_part(of, causal=self.causal)
        (o,), _ = to_tokens(self.peers, [attended.o])
        return attended._replace(o=o)

    def gradients(self, of: Operands, attended: Attended, grad_o: torch.Tensor) -> Gradients:
        """Return the gradients of this rank's tokens, E5M2, for the output's gradient [s, b, heads * d] of these tokens."""
        grad, of_grad = self.cast_one(grad_o.view(attended.o.shape), GRAD)
        (o, grad), of_ranks = to_heads(self.peers, (attended.o, grad), of_grad.view(1))
        part = self.part_gradients(of, attended._replace(o=o), grad, of_ranks.amax(), causal=self.causal)
        (dq, dk, dv), of_ranks = to_tokens(self.peers, part[:3], part.scale_invs)
        return Gradients(dq, dk, dv, of_ranks.amax(0))

    def backward(
        self, of: Operands, attended: Attended, grad: torch.Tensor, scales: AttentionScales, *, causal: bool
    ) -> tuple[torch.Tensor, ...]:
        """Run the backward kernel; the amaxes, from which scales may follow, are over all ranks until the scales are delayed."""
        *gradients, amaxes = super().backward(of, attended, grad, scales, causal=causal)
        return *gradients, amaxes if self.scaling.delayed else self._agree(amaxes)
