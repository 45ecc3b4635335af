"""Send one bucket of gradients: agree on scales, pack, reduce, deliver the averages (FP8-LM section 2.1).

`GradSync` decides when to send a bucket. `BucketSender` does the rest in four steps, each in its own method:

    agree     proposals [tensors]   each rank's scales, then the minimum over all ranks: one small MIN all-reduce (equation 4)
    pack      flat [elements]       the gradients times `factor`, cast into one buffer
    reduce    `Reduced`             the averages, from the exchange's wire or from the owners' sums over micro-batches
    deliver   p.main_grad           or, under ZeRO, `piece.grad` on the owner

`Statistics` measures after `pack` and after `reduce`. On a GPU a bucket is sent on a separate stream, concurrently with backward.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from msamp.comm.bucket import Bucket
from msamp.comm.collectives import OtherRanks, Peers
from msamp.comm.exchange import Exchange, PlainWire, Reduced, SummingWire, Wire
from msamp.comm.grad_scaling import ABSENT, MU_RULES, AutoScale, GradScaling, proposals_of, propose_scales, scales_of
from msamp.comm.statistics import SATURATED, SUM_SATURATED, Statistics
from msamp.numerics.formats import Format
from msamp.numerics.tensor import ScalingTensor, fp32_values

Gradients = Sequence[Tensor | None]


class OwnerSums:
    """The FP32 sums over a step's micro-batches so far, for this rank's rows (`accumulate="owner"`).

    By default, each rank accumulates the gradients of its micro-batches for the whole model and sends the sum once. That takes 2 bytes per
    parameter on every rank for BF16. Here, the gradient of each of M micro-batches is sent at once, in its payload format, and the owner of
    a row accumulates the averages in FP32: 4 / N bytes per parameter on N ranks.

        mean_m  = sum_i q_im / (factor_m N)      [own rows]   of micro-batch m, in FP32 at the owner
        total   = mean_1 + ... + mean_M          [own rows]   in FP32
        average = cast(scale total)              [own rows]   once per step, with a scale from the total's amax

    The cost is M times the bytes on the wire. With three ranks or more it needs less memory than BF16 sums, with five or more less than
    FP8 sums on every rank. Values are rounded once per micro-batch, each with its own scale, instead of after every addition.
    """

    def __init__(self) -> None:
        self._sums: dict[Bucket, Tensor] = {}
        self._proposals: dict[Bucket, Tensor] = {}

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket in self._sums

    def clear(self) -> None:
        """Forget the micro-batches of the last step."""
        self._sums, self._proposals = {}, {}

    def add(self, bucket: Bucket, mean: Tensor, factor: Tensor, proposals: Tensor) -> None:
        """Add one micro-batch.

        Args:
            mean: FP32 [own elements], `factor` times too large; may be overwritten.
            factor: FP32 [parameters].
            proposals: FP32 [parameters], the same on all ranks: a gradient that is non-finite in one micro-batch is non-finite in the sum.
        """
        for piece in bucket.owned:  # a power of two: exact
            bucket.part(piece, mean).div_(factor[piece.index])
        earlier = self._sums.get(bucket)
        self._sums[bucket] = mean if earlier is None else earlier.add_(mean)
        worst = self._proposals.get(bucket)
        # In place, as the sums are: a CUDA graph of a micro-batch finds both where they were captured.
        self._proposals[bucket] = proposals.clone() if worst is None else torch.minimum(worst, proposals, out=worst)

    def take(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Remove and return the sum, FP32 [own elements], and the minimum proposals over all micro-batches."""
        return self._sums.pop(bucket), self._proposals.pop(bucket)


class BucketSender:
    """Averages the gradients of one bucket at a time over the data-parallel ranks.

    Args:
        buckets: all buckets, in the order in which they are sent.
        peers: the data-parallel ranks.
        exchange, scaling, mu_rule, shard: as for `GradSync`.
        device: of the gradients.
        others: the parameters that other ranks than `peers` average.

    Attributes:
        wires: gradient format -> the wire that sends it.
        owner_sums: the sums of earlier micro-batches, if each micro-batch is sent separately.
        autoscale: mu of the scaled gradients; None if the scaling has no adaptive mu.
        statistics: saturation and underflow before and after the exchange.
        own_proposals: FP32 [parameters], see `GradSync`.

    Raises:
        ValueError: an adaptive mu with `others`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        peers: Peers,
        exchange: Exchange,
        scaling: GradScaling,
        *,
        mu_rule: str | None,
        shard: bool,
        device: torch.device,
        others: OtherRanks | None = None,
    ) -> None:
        self.peers, self.exchange, self.scaling, self.shard, self.others = peers, exchange, scaling, shard, others
        self._several = peers.ranks > 1 or (others is not None and others.peers.ranks > 1)
        self.wires: dict[Format, Wire] = {f: exchange.wire(f) if f.scaled else PlainWire(f) for f in {b.format for b in buckets}}
        if scaling.adapts and others is not None:
            raise ValueError(
                f"gradient scaling {scaling.name!r} does not support parameters that other ranks average; choose exchange 'fp32-sum', "
                "which requires no scaling"
            )
        self.owner_sums = OwnerSums()
        numel = [p.numel() for bucket in buckets if bucket.format.scaled for p in bucket.params]
        self.autoscale = AutoScale(numel, peers.ranks, mu_rule or MU_RULES[0], device) if scaling.adapts else None
        owned = sum(piece.elements for bucket in buckets if bucket.format.scaled for piece in bucket.owned)
        self.statistics = Statistics(numel, device, always=self.autoscale is not None, owned=owned)
        self.own_proposals = torch.ones(sum(len(bucket.params) for bucket in buckets), device=device, dtype=torch.float32)
        self._valid = torch.zeros(len(numel), dtype=torch.bool, device=device)
        self._places = _slices(buckets, [len(bucket.params) for bucket in buckets])
        self._scaled_places = _slices(buckets, [len(bucket.params) if bucket.format.scaled else 0 for bucket in buckets])
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and self._several else None

    def peers_of(self, bucket: Bucket) -> Peers:
        """Return the ranks that average a bucket's gradients."""
        others = self.others
        return others.peers if others is not None and bucket.params[0] in others.params else self.peers

    def weight_of(self, bucket: Bucket) -> float:
        """Return the factor of a bucket's averages (`OtherRanks.weight`)."""
        others = self.others
        return others.weight if others is not None and bucket.params[0] in others.params else 1.0

    @torch.no_grad()
    def send(self, bucket: Bucket, *, last: bool) -> None:
        """Average a bucket's gradients and release them; collective.

        Args:
            last: whether these are the bucket's last gradients in the step. Earlier ones are summed at their owner.
        """
        with self._on_stream(bucket):
            gradients = [fp32_values(g) if isinstance(g, ScalingTensor) else g if g is None else g.contiguous() for g in bucket.gradients]
            bucket.gradients = [None] * len(gradients)
            missing = [i for i, g in enumerate(gradients) if g is None]
            summed = bucket in self.owner_sums
            proposals = self.agree(bucket, gradients)
            factor = scales_of(proposals)  # from gradients to payloads
            if bucket.format.scaled:
                mu = None if self.autoscale is None else self.autoscale.mu[self._scaled_places[bucket]]
                factor = self.scaling.factor(factor, self.peers_of(bucket).ranks, mu)
            flat = self.pack(bucket, gradients, factor)
            if not last:
                del gradients
                self._add(bucket, flat, factor, proposals)
                bucket.forget()
                return
            self.statistics.observe_packed(self._scaled_places[bucket].start, bucket, gradients, flat, factor)
            del gradients
            reduced, proposals = self.reduce(bucket, flat, factor, proposals)
            # Only a rank without a gradient checks whether the others had one. That is a host sync, but not in a usual step.
            bucket.absent = {i for i in missing if (self.peers_of(bucket).ranks == 1 and not summed) or proposals[i].item() == ABSENT}
            self.deliver(bucket, reduced, proposals)

    def wait(self) -> None:
        """Make the compute stream wait for what has been sent."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def finish_step(self) -> None:
        """Set mu for the next step, after every bucket was sent."""
        if self.autoscale is not None:
            summed, largest = self.statistics.combine(self.peers)
            self.autoscale.update(largest[SATURATED], summed[SUM_SATURATED], self._valid)

    def clear(self) -> None:
        """Forget the last step."""
        self.owner_sums.clear()
        self.statistics.clear()

    def agree(self, bucket: Bucket, gradients: Gradients) -> Tensor:
        """Return the minimum of the ranks' proposals (`propose_scales`), FP32 [parameters]."""
        fmt, peers = self.wires[bucket.format].format, self.peers_of(bucket)
        here = [g for g in gradients if g is not None]
        if fmt.scaled and self.autoscale is None and len(here) == len(gradients):  # with an adaptive mu every guess would be wrong
            proposals = proposals_of(bucket.packed.measure(here, fmt), fmt)
        else:
            device = bucket.params[0].device
            proposals = propose_scales(gradients, fmt, device, bucket.tables, plain=bucket.format.scaled or self._several)
        if self._several:  # after the exchange, nobody knows which rank had the non-finite gradient
            own = self.own_proposals[self._places[bucket]]
            own.copy_(torch.minimum(own, proposals) if bucket in self.owner_sums else proposals)
        peers.all_reduce(proposals, dist.ReduceOp.MIN, f"the scales of {bucket}")
        return proposals

    def pack(self, bucket: Bucket, gradients: Gradients, factor: Tensor) -> Tensor:
        """Return the flat payload of the bucket, with zeros where this rank has no gradient."""
        device = bucket.params[0].device
        filled = [
            torch.zeros(p.shape, device=device, dtype=torch.float32) if g is None else g
            for p, g in zip(bucket.params, gradients, strict=True)
        ]
        wire = self.wires[bucket.format]
        # Payloads without a scale get the weight here, in the kernel that packs them. For scaled ones, `reduce` puts it into the scale.
        weight = 1.0 if wire.format.scaled else self.weight_of(bucket)
        return wire.pack(bucket, filled, factor if weight == 1.0 else factor * weight)

    def reduce(self, bucket: Bucket, flat: Tensor, factor: Tensor, proposals: Tensor) -> tuple[Reduced, Tensor]:
        """Return the averages, and the minimum proposals over all micro-batches in them, FP32 [parameters]."""
        wire, peers = self.wires[bucket.format], self.peers_of(bucket)
        weight = self.weight_of(bucket) if wire.format.scaled else 1.0
        if bucket in self.owner_sums:
            assert isinstance(wire, SummingWire)
            self._add(bucket, flat, factor, proposals)
            total, proposals = self.owner_sums.take(bucket)
            factor = torch.full_like(factor, 1 / weight)
            reduced = wire.store(bucket, total, factor, peers, self.shard)
        else:
            factor = factor if weight == 1.0 else factor / weight
            reduced = wire.reduce(bucket, flat, factor, peers, self.shard)
        if reduced.own.dtype != bucket.format.dtype:
            raise ValueError(
                f"gradient exchange {self.exchange} returned averages of {bucket} in {reduced.own.dtype}, but its gradients are "
                f"{bucket.format}; round to {bucket.format.dtype} in the wire's reduce"
            )
        place = self._scaled_places[bucket]
        if self.autoscale is not None and bucket.format.scaled:
            self._valid[place] = (proposals > 0) & ~proposals.isinf()
        self.statistics.observe_reduced(place.start, bucket, reduced, factor, ranks=peers.ranks, fp32_sum=self.exchange.sums_in_fp32)
        return reduced, proposals

    def deliver(self, bucket: Bucket, reduced: Reduced, proposals: Tensor) -> None:
        """Store the averages where the optimizer reads them."""
        scale_inv = None if reduced.scale_inv is None else reduced.scale_inv.masked_fill(proposals < 0, float("nan"))
        # A parameter in several pieces has a tally for each piece, but none for the whole.
        tallies = None if reduced.tallies is None or bucket.cut else reduced.tallies.unbind()
        bucket.forget()

        def average(payload: Tensor, i: int) -> Tensor:
            if scale_inv is None:
                return payload
            return ScalingTensor(payload, scale_inv[i], bucket.params[i].dtype, tally=None if tallies is None else tallies[i])

        if self.shard:
            for piece in bucket.owned:
                if piece.index not in bucket.absent:
                    p = bucket.params[piece.index]
                    shape = (piece.rows, *p.shape[1:]) if p.dim() else ()
                    piece.grad = average(bucket.part(piece, reduced.own).view(shape), piece.index)
            return
        flat = reduced.flat
        if flat is None:
            flat = self.peers_of(bucket).all_gather(reduced.own, bucket.sizes, f"the averaged gradients of {bucket}")
        for i, (p, payload) in enumerate(zip(bucket.params, bucket.unflatten(flat), strict=True)):
            if i not in bucket.absent:
                p.main_grad = average(payload, i)  # type: ignore[attr-defined]

    def _add(self, bucket: Bucket, flat: Tensor, factor: Tensor, proposals: Tensor) -> None:
        """Add a micro-batch to the sums at the owners."""
        wire = self.wires[bucket.format]
        assert isinstance(wire, SummingWire)
        self.owner_sums.add(bucket, wire.mean(bucket, flat, self.peers_of(bucket)), factor, proposals)

    @contextlib.contextmanager
    def _on_stream(self, bucket: Bucket) -> Iterator[None]:
        # Nothing overlaps with one rank. A capture would keep every recorded gradient's memory until its end: 27 GiB of Qwen3-30B-A3B.
        if self._stream is None or self.peers_of(bucket).ranks == 1:
            yield
            return
        for g in bucket.gradients:
            if g is not None:  # written on the compute stream, read on this one: keep its memory until both are done
                for part in (g.payload, g.scale_inv) if isinstance(g, ScalingTensor) else (g,):
                    part.record_stream(self._stream)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


def _slices(buckets: Sequence[Bucket], sizes: Sequence[int]) -> dict[Bucket, slice]:
    """Return the slice of each bucket's tensors in an array over all buckets."""
    ends = list(itertools.accumulate(sizes))
    return {bucket: slice(end - size, end) for bucket, size, end in zip(buckets, sizes, ends, strict=True)}
