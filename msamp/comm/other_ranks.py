"""Parameters whose gradients are averaged over a different group of ranks than the rest of the model: the experts under expert parallelism.

N ranks share the experts of a layer, and each computes its experts for the tokens of all N. So the same expert has fewer copies than the
rest of the model, C instead of D data-parallel ones, and each copy's gradient already contains the tokens of N ranks. The gradient of the
mean loss is the sum over the copies divided by D, whatever C is:

    average = (C / D) mean over the C copies
"""

from collections.abc import Iterable

from torch import Tensor

from msamp.comm.bucket import Bucket
from msamp.comm.collectives import Peers


class OtherRanks:
    """The ranks that average the gradients of some parameters.

    Args:
        peers: the ranks, a subset of those that see different tokens; a single one averages nothing.
        params: the parameters, which share no bucket with others.
        weight: factor of the average, C / D.

    Raises:
        ValueError: if the weight is not positive.
    """

    def __init__(self, peers: Peers, params: Iterable[Tensor], weight: float) -> None:
        if not weight > 0:
            raise ValueError(f"the weight of an average is {weight}; it must be positive: pass copies over data-parallel ranks")
        self.peers, self.params, self.weight = peers, frozenset(params), weight

    def average(self, bucket: Bucket) -> bool:
        """Return whether these ranks average the gradients of a bucket."""
        return bucket.params[0] in self.params
