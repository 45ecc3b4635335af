"""FP8 attention of some heads of whole sequences: `msamp.nn.fp8_attention` between the all-to-alls of `msamp.parallel.head_exchange`.

What the all-to-alls carry are the FP8 codes that the kernels read and write, a byte per element, but for the output's gradient:

    forward    queries, keys, values     E4M3    cast by the rank of their tokens
               output                    E4M3    cast by the rank of its heads: at the rank of its tokens it is the projection's operand
    backward   output                    E4M3    once more, for the projection's gradient, so that it need not be kept
               gradient of the output    compute dtype: the rank of its heads casts what is left without the first token's share
               gradients of q, k, v      E5M2    cast in the kernel; sums over more than `FP8_QUERIES` queries in the compute dtype
               the first token's scores' gradients, FP32, one per head and token

The scales are the same as on one process. Delayed scales are the same on all ranks. Just-in-time scales, of the first steps, follow from
the largest amax of all ranks: the ranks agree on amaxes before a cast, and between the two runs of the backward kernel. Two ranks' scales
would not do: the kernels take one scale per tensor. A rank whose tensor is all zero has no scale, and uses the others'.

The first token's key and value and the mean of the values are summed over the ranks in FP32 before the cast, so output and gradients equal
one process's but for the order of these sums.

A scale_inv that is NaN, since a tensor is not finite, travels with the codes and is NaN on all ranks.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from msamp.kernels.reference.fp8_attention import AttentionScales
from msamp.nn.cast_scales import CastScales
from msamp.nn.fp8_attention import Attended, Gradients, Operands, Prepared, SinkGradients
from msamp.parallel.fp8_ring_attention import FP8OverRanks
from msamp.parallel.head_exchange import check_divisible, to_heads, to_tokens
from msamp.parallel.ring_attention import KIND


@dataclass(frozen=True)
class FP8HeadExchange(FP8OverRanks):
    """`FP8Attention` whose heads are divided between the ranks that share the sequences.

    `exchange` returns the operands of this rank's heads, [ranks * s, b, heads / ranks, d], which the other methods take; the output, its
    gradient and `gradients` are of all heads of this rank's s tokens.
    """

    def exchange(self, of: Operands) -> Operands:
        """Return the operands of this rank's heads of all tokens.

        Raises:
            ValueError: if the heads or the groups cannot be divided between the ranks, or the number of tokens is odd.
        """
        check_divisible(self.peers.ranks, of.query.shape[0], of.query.shape[2], of.key.shape[2])
        (query, key, value), scale_invs = to_heads(self.peers, of[:3], of.scale_invs)
        groups = of.sink.shape[2] // self.peers.ranks
        sink = of.sink[:, :, self.peers.rank * groups : (self.peers.rank + 1) * groups].contiguous()
        return Operands(query, key, value, scale_invs.amax(0), sink)

    def output(self, of: Operands, attended: Attended, dtype: torch.dtype, slot: CastScales, scale_inv: torch.Tensor) -> torch.Tensor:
        """Return the output of all heads of this rank's tokens."""
        (o,), _ = to_tokens(self.peers, [super().output(of, attended, dtype, slot, scale_inv)])
        return o

    def prepare(self, of: Operands, attended: Attended, grad_o: torch.Tensor, output_scale_inv: torch.Tensor | None = None) -> Prepared:
        """Like `FP8Attention.prepare`, for the gradient of all heads of this rank's tokens; `codes` are of these too."""
        _, b, heads, d = of.query.shape
        (grad,), _ = to_heads(self.peers, [grad_o.reshape(-1, b, heads * self.peers.ranks, d)])
        prepared = super().prepare(of, attended, grad, output_scale_inv)
        if output_scale_inv is None:
            return prepared
        (codes,), _ = to_tokens(self.peers, [prepared.codes])
        return prepared._replace(codes=codes)

    def prepared_gradients(self, of: Operands, prepared: Prepared) -> Gradients:
        """Return the gradients of this rank's tokens."""
        *parts, scale_invs, _ = super().prepared_gradients(of, prepared)
        s, peers = len(of.query), self.peers
        whole = [torch.cat([x.new_zeros((s - len(x), *x.shape[1:])), x]) if len(x) < s else x for x in parts]
        (dq, dk, dv), _ = to_tokens(peers, whole)
        (ds,), _ = to_tokens(peers, [prepared.sink.ds[..., None]])
        first = prepared.sink.first
        groups = first.shape[2]
        of_all = first.new_zeros((3, first.shape[1], groups * peers.ranks, first.shape[3]))
        of_all[:, :, peers.rank * groups : (peers.rank + 1) * groups] = first
        peers.all_reduce(of_all, dist.ReduceOp.SUM, "gradients of the first key and value", KIND, "first token all-reduce")
        if not self.begins:
            of_all[1:].zero_()
        return Gradients(dq, dk, dv, scale_invs, SinkGradients(ds.squeeze(3), of_all))

    def backward(self, of: Operands, prepared: Prepared, scales: AttentionScales, *, causal: bool) -> tuple[torch.Tensor, ...]:
        """Run the backward kernel; the amaxes, from which scales may follow, are over all ranks until the scales are delayed."""
        *gradients, amaxes = super().backward(of, prepared, scales, causal=causal)
        return *gradients, amaxes if self.scaling.delayed else self._agree(amaxes)
