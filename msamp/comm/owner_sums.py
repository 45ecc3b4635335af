"""FP32 gradient accumulation over micro-batches at the owner of each row (`accumulate="owner"`).

By default, each rank accumulates the gradients of its micro-batches for the whole model and sends the sum once. That takes 2 bytes per
parameter on every rank for BF16, whatever the number of ranks. Here, the gradient of each of M micro-batches is sent at once, in its
payload format, and the owner of a row accumulates the averages in FP32: 4 / N bytes per parameter on N ranks.

    mean_m  = sum_i q_im / (factor_m N)      [own rows]   of micro-batch m, in FP32 at the owner
    total   = mean_1 + ... + mean_M          [own rows]   in FP32
    average = cast(scale total)              [own rows]   once per step, with a scale from the total's amax

The cost is M times the bytes on the wire. With three ranks or more it needs less memory than BF16 sums, with five or more less than FP8
sums on every rank. Values are rounded once per micro-batch, each with its own scale, instead of after every addition.
"""

from typing import Protocol, runtime_checkable

import torch

from msamp.comm.bucket import Bucket
from msamp.comm.collectives import Peers
from msamp.comm.exchange import Reduced, Wire


@runtime_checkable
class SummingWire(Wire, Protocol):
    """A wire whose `reduce` computes the FP32 mean at the owner and rounds it once."""

    def mean(self, bucket: Bucket, flat: torch.Tensor, peers: Peers) -> torch.Tensor:
        """Return this rank's slice of the mean of the payloads `flat` over the ranks, FP32 [own elements]."""

    def store(self, bucket: Bucket, mean: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        """Store the mean, which is `factor` (FP32 [parameters]) times too large, in the format of the bucket."""


class OwnerSums:
    """The sums over a step's micro-batches so far, for this rank's rows."""

    def __init__(self) -> None:
        self._sums: dict[Bucket, torch.Tensor] = {}
        self._proposals: dict[Bucket, torch.Tensor] = {}

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket in self._sums

    def clear(self) -> None:
        """Forget the micro-batches of the last step."""
        self._sums, self._proposals = {}, {}

    def add(self, bucket: Bucket, mean: torch.Tensor, factor: torch.Tensor, proposals: torch.Tensor) -> None:
        """Add one micro-batch.

        Args:
            mean: FP32 [own elements], `factor` times too large; may be overwritten.
            factor: FP32 [parameters].
            proposals: FP32 [parameters], the same on all ranks: a gradient that is non-finite in one micro-batch is non-finite in the sum.
        """
        for segment in bucket.owned:  # a power of two: exact
            bucket.part(segment, mean).div_(factor[segment.index])
        earlier = self._sums.get(bucket)
        self._sums[bucket] = mean if earlier is None else earlier.add_(mean)
        worst = self._proposals.get(bucket)
        # In place, as the sums are: a CUDA graph of a micro-batch finds both where they were captured.
        self._proposals[bucket] = proposals.clone() if worst is None else torch.minimum(worst, proposals, out=worst)

    def take(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Remove and return the sum, FP32 [own elements], and the minimum proposals over all micro-batches."""
        return self._sums.pop(bucket), self._proposals.pop(bucket)
