"""Saturation and underflow of scaled gradients before and after the exchange, counted on the device and combined once per step."""

from collections.abc import Sequence

import torch

from msamp.comm.bucket import Bucket
from msamp.comm.collectives import Peers
from msamp.comm.exchange import Reduced
from msamp.kernels import ops
from msamp.numerics.metrics import TALLY

NONZERO, SATURATED, VANISHED, SUM_NONZERO, SUM_SATURATED, SUM_VANISHED = range(6)


class Statistics:
    """Counts of one step, per tensor.

    Args:
        numel: elements of each scaled gradient, in the order of the buckets.
        device: of the gradients.
        always: count in every step (mu needs it); else only in steps that `watch` selects, since counting reads every payload again.
        owned: elements of the sums that this rank owns; None on a single rank, which owns all.

    Attributes:
        active: whether this step is counted.
        counts: int64 [6, n]: non-zero, saturated and underflowed elements of this rank's payload, and the same three of the sum, in the
            pieces that this rank owns. An element of the sum has underflowed if it is zero but the FP32 sum is not (if the exchange does
            not sum in FP32: but this rank's own payload is not).
        recording: whether this step is counted and `tallies` are recorded too.
        tallies: FP64 [2, n, 8], as in `msamp.kernels.ops.tally_`: this rank's payload against its gradient, and the payload of the sum
            against the FP32 sum (against itself if no rank has it), in the pieces that this rank owns.
    """

    def __init__(self, numel: Sequence[int], device: torch.device, always: bool, owned: int | None = None) -> None:
        self.numel = list(numel)
        self.owned = sum(self.numel) if owned is None else owned
        self.always = always
        self.active = always
        self.counts = torch.zeros(len(self.numel), 6, dtype=torch.int64, device=device).T  # each three counts of a tensor are contiguous
        self.recording = False
        self.tallies = torch.zeros(2, len(self.numel), len(TALLY), dtype=torch.float64, device=device)

    def watch(self, on: bool, record: bool = False) -> None:
        """Set whether the next step is counted; with `record`, tallies are recorded too."""
        self.active = on or record or self.always
        self.recording = record

    def clear(self) -> None:
        """Start a step."""
        self.counts.zero_()
        if self.recording:
            self.tallies.zero_()

    def observe_packed(
        self, first: int, bucket: Bucket, gradients: Sequence[torch.Tensor | None], flat: torch.Tensor, factor: torch.Tensor
    ) -> None:
        """Measure a bucket before the exchange, if this step is counted and the bucket's format has scales.

        Args:
            first: index of its first tensor among the scaled ones.
            gradients: of this rank; None where it has none.
            flat: the payloads.
            factor: FP32 [parameters], from gradients to payloads.
        """
        if not (self.active and bucket.format.scaled):
            return
        payloads = bucket.unflatten(flat)
        for i, (g, payload) in enumerate(zip(gradients, payloads, strict=True)):
            if g is not None:
                ops.count_(self.counts[:SUM_NONZERO, first + i], g, payload)
                if self.recording:
                    ops.tally_(self.tallies[0, first + i], g, payload, factor[i].reciprocal())

    def observe_reduced(self, first: int, bucket: Bucket, reduced: Reduced, factor: torch.Tensor, *, ranks: int, fp32_sum: bool) -> None:
        """Measure this rank's slice of the averages of the same bucket.

        Args:
            factor: FP32 [parameters], of `reduced.before`.
            ranks: number of ranks in the average.
            fp32_sum: whether `reduced.before` is the FP32 sum.
        """
        if not (self.active and bucket.format.scaled):
            return
        if ranks == 1 and reduced.before is reduced.own:
            # The sum of a single rank is its payload, which need not be read again.
            place = slice(first, first + len(bucket.params))
            packed, summed = self.counts[:SUM_NONZERO, place], self.counts[SUM_NONZERO:, place]
            summed.copy_(torch.stack([packed[NONZERO] - packed[VANISHED], packed[SATURATED], torch.zeros_like(packed[VANISHED])]))
            return
        whole = reduced.reference()
        for piece in bucket.owned:
            i, before, payload = piece.index, bucket.part(piece, whole), bucket.part(piece, reduced.own)
            ops.count_(self.counts[SUM_NONZERO:, first + i], before, payload)
            if self.recording and ranks > 1 and reduced.scale_inv is not None:
                values = before / factor[i] if fp32_sum else payload.float() * reduced.scale_inv[i]
                ops.tally_(self.tallies[1, first + i], values, payload, reduced.scale_inv[i])

    def combine(self, peers: Peers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the counts' sums and maxima over the ranks, int64 [6, n] each; one small collective."""
        gathered = peers.all_gather(self.counts.flatten(), [self.counts.numel()] * peers.ranks, "the counts of the gradients")
        stacked = gathered.view(peers.ranks, *self.counts.shape)
        return stacked.sum(0), stacked.amax(0)

    def shares(self, peers: Peers) -> dict[str, float]:
        """Return saturation and underflow over all scaled gradients and ranks, before and after the exchange; collective, a host sync.

        Saturation is a share of all elements; underflow is a share of the non-zero elements, in the gradient and in the sum.
        """
        total = self.combine(peers)[0].sum(1).tolist()
        elements = max(1, sum(self.numel))
        own = torch.tensor([self.owned], device=self.counts.device)
        owned = max(1, int(peers.all_gather(own, [1] * peers.ranks, "the number of elements that each rank owns").sum()))
        return {
            "grad_saturation": total[SATURATED] / (elements * peers.ranks),
            "grad_underflow": total[VANISHED] / max(1, total[NONZERO]),
            "grad_saturation_reduced": total[SUM_SATURATED] / owned,
            "grad_underflow_reduced": total[SUM_VANISHED] / max(1, total[SUM_NONZERO]),
        }
