"""Sums of micro-batches at the owner of each row, in FP32 (`accumulate="owner"`).

What: M micro-batches of a step give M gradients of every parameter. By default each rank adds its own up in 16 or 32 bits for the whole
model, and the sum leaves once: 2 bytes a parameter on every rank for BF16, whatever the number of ranks. Here the gradient of each
micro-batch leaves at once, in its payload format, and the owner of a row adds the averages up in FP32: 4 / N bytes a parameter on N ranks.

    mean_m  = sum_i q_im / (factor_m N)      [own rows]   of micro-batch m, in FP32 at the owner
    total   = mean_1 + ... + mean_M          [own rows]   in FP32
    average = cast(scale total)              [own rows]   once a step, the scale by the total's own amax

The price is on the wire: M times the bytes. From three ranks on it is less memory than BF16 sums, from five on less than FP8 sums on
every rank, and the values are rounded once a micro-batch, each with its own scale, instead of after each addition.
"""

from typing import Protocol, runtime_checkable

import torch

from msamp.comm.bucket import Bucket
from msamp.comm.collectives import Peers
from msamp.comm.exchange import Reduced, Wire


@runtime_checkable
class SummingWire(Wire, Protocol):
    """A wire with a `reduce` that takes the mean in FP32 at the owner, and rounds it once."""

    def mean(self, bucket: Bucket, flat: torch.Tensor, peers: Peers) -> torch.Tensor:
        """FP32 [own elements]: the mean over the ranks of the payloads `flat`, of which this rank keeps its slice."""

    def store(self, bucket: Bucket, mean: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        """The mean, `factor` FP32 [parameters] times too large, in the format of the bucket."""


class OwnerSums:
    """The sums of a step's micro-batches so far, of this rank's rows."""

    def __init__(self) -> None:
        self._sums: dict[Bucket, torch.Tensor] = {}
        self._proposals: dict[Bucket, torch.Tensor] = {}

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket in self._sums

    def clear(self) -> None:
        """Forget the micro-batches of the last step."""
        self._sums, self._proposals = {}, {}

    def add(self, bucket: Bucket, mean: torch.Tensor, factor: torch.Tensor, proposals: torch.Tensor) -> None:
        """One micro-batch.

        Args:
            mean: FP32 [own elements], `factor` times too large; used up.
            factor: FP32 [parameters].
            proposals: FP32 [parameters], agreed by the ranks: what is not finite in one micro-batch stays so in the sum.
        """
        for segment in bucket.owned:  # a power of two: exact
            bucket.part(segment, mean).div_(factor[segment.index])
        earlier = self._sums.get(bucket)
        self._sums[bucket] = mean if earlier is None else earlier.add_(mean)
        worst = self._proposals.get(bucket)
        self._proposals[bucket] = proposals.clone() if worst is None else torch.minimum(worst, proposals)

    def take(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """(the sum FP32 [own elements], the least proposals of all micro-batches), handed out once."""
        return self._sums.pop(bucket), self._proposals.pop(bucket)
