"""What of a gradient travels, and how it is summed (FP8-LM section 2.1, equations 1 to 6).

The seam is `pack / reduce`: `factor` is what multiplies a gradient into its payload, so that the average over N ranks is
the sum of the payloads divided by `factor * N`, whatever the strategy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from msamp.comm.bucket import Bucket
from msamp.comm.collectives import Peers
from msamp.kernels import ops
from msamp.numerics.formats import Format
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse, scale_from_amax


@dataclass(frozen=True)
class Reduced:
    """The averaged gradients of a bucket.

    Attributes:
        own: flat payload of this rank's slice.
        flat: the whole bucket's, where every rank has got it already, else None.
        scale_inv: FP32 [parameters]: of the payload; None for a format without scales. Only valid where this rank has
            the payload.
        before: flat, like `own`: what must not have vanished from it (the FP32 sum, or this rank's own payload).
    """

    own: torch.Tensor
    flat: torch.Tensor | None
    scale_inv: torch.Tensor | None
    before: torch.Tensor


class Wire(Protocol):
    """The seam: one way to send gradients."""

    def pack(self, bucket: Bucket, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        """The flat payload of a bucket's gradients, contiguous and one a parameter; `factor` FP32 [parameters]."""

    def reduce(self, bucket: Bucket, flat: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        """Average the packed bucket over the ranks; `factor` FP32 [parameters], `shard`: only the owner needs the result."""


class PlainWire:
    """FP32 or BF16 payloads, summed by their owner in FP32 and rounded once."""

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def pack(self, bucket: Bucket, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        return bucket.flatten(gradients, self.format)

    def reduce(self, bucket: Bucket, flat: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        if peers.ranks == 1:
            return Reduced(flat, flat, None, flat)
        received = peers.all_to_all(flat, bucket.sizes, f"the gradients of {bucket}")
        mean = (sum_in_rank_order(received) / peers.ranks).to(self.format.dtype)
        return Reduced(mean, None, None, mean)


class FP32SumWire:
    """Scaled payloads, dequantised and summed in FP32 by their owner, rounded once with a scale of the sum's own amax.

    The sum does not overflow, and its error is that of one rounding a rank and one of the sum: 2 to 70 times less than
    NCCL's, at the same bytes.
    """

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def pack(self, bucket: Bucket, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        return bucket.flatten(gradients, self.format, factor)

    def reduce(self, bucket: Bucket, flat: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        if peers.ranks == 1:
            return Reduced(flat, flat, inverse(factor), flat)
        # The factor is a power of two: it goes in and out without rounding, and only 1 / N may round.
        mean = sum_in_rank_order(peers.all_to_all(flat, bucket.sizes, f"the gradients of {bucket}")).div_(peers.ranks)
        parts = list(mean.split([segment.elements for segment in bucket.owned]))
        amax = torch.zeros_like(factor)
        places = bucket.sum_tables.send("owned", [segment.index for segment in bucket.owned])
        if parts:
            amax.scatter_reduce_(0, places, ops.grad_stats(bucket.sum_tables, parts, False)[0][0], "amax").div_(factor)
        if bucket.cut or not shard:  # a scale for all pieces of a tensor, and for all who will hold it
            peers.all_reduce(amax, dist.ReduceOp.MAX, f"the amax of the gradients of {bucket}")
        scale = scale_from_amax(amax, self.format.max)
        own = torch.empty_like(mean, dtype=flat.dtype)
        spans = [(i, 0, segment.elements, segment.start - bucket.own.start) for i, segment in enumerate(bucket.owned)]
        ops.pack(bucket.sum_tables, parts, spans, own, (scale / factor)[places])
        return Reduced(own, None, inverse(scale), mean)


class NCCLWire(FP32SumWire):
    """Scaled payloads summed in their own format as in the paper: each hop rounds, and the sum saturates silently.

    Over NCCL this is NCCL's sum. Over any other backend the payloads travel as bytes and their owner adds them one after
    the other in rank order, rounding each time: the same arithmetic, in one of the orders in which NCCL may do it.
    """

    def reduce(self, bucket: Bucket, flat: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        scale_inv = inverse(factor) / peers.ranks  # factor * N would leave FP32 for gradients near the end of its range
        if peers.ranks == 1:
            return Reduced(flat, flat, scale_inv, flat)
        what, before = f"the gradients of {bucket}", flat[bucket.own]
        if not peers.nccl:
            return Reduced(self._sum(peers.all_to_all(flat, bucket.sizes, what)), None, scale_inv, before)
        if shard:
            return Reduced(self._saturate(peers.reduce_scatter(flat, bucket.sizes, what)), None, scale_inv, before)
        before = before.clone()
        peers.all_reduce(flat, dist.ReduceOp.SUM, what)
        self._saturate(flat)
        return Reduced(flat[bucket.own], flat, scale_inv, before)

    def _saturate(self, total: torch.Tensor) -> torch.Tensor:
        # NCCL's FP8 sum saturates by itself; its FP16 sum becomes infinite (H200, NCCL 2.28), which would reach the weights.
        return total.clamp_(-self.format.max, self.format.max) if self.format.bytes > 1 else total

    def _sum(self, received: Sequence[torch.Tensor]) -> torch.Tensor:
        total = received[0]
        for payload in received[1:]:
            total = quantize(total.float() + payload.float(), 1.0, self.format)
        return total


def pack_scaled(g: torch.Tensor, factor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`cast(g * factor)`, contiguous, in the shape of `g`."""
    if fmt.bytes > 1 or g.numel() == 0:
        return quantize(g, factor, fmt).contiguous()
    rows = g.reshape(g.shape[0], -1) if g.dim() > 1 else g.reshape(1, -1)
    return ops.cast(rows, factor, fmt.dtype).view(g.shape)


def sum_in_rank_order(payloads: Sequence[torch.Tensor]) -> torch.Tensor:
    """FP32 sum of payloads of any format, always in the same order."""
    total = payloads[0].to(torch.float32, copy=True)
    for payload in payloads[1:]:
        total += payload.float()
    return total
