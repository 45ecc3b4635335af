"""Which rank owns which rows of which tensor (FP8-LM 2.3, Algorithm 1), as pure functions of sizes.

Algorithm 1 assigns tensors, largest first, to the rank with the smallest load. With few tensors per rank, whole tensors balance badly (for
GPT-345M on 128 ranks, the busiest rank holds 78 % more than the mean), so tensors that are too large are cut along dim 0. Loads are counted
in elements.
"""

import heapq
import itertools
import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """Rows [row, row + rows) along dim 0 of tensor number `tensor`, owned by rank `owner`."""

    tensor: int
    row: int
    rows: int
    owner: int


@dataclass(frozen=True)
class Partition:
    """Pieces that cover every row of every tensor exactly once.

    Attributes:
        pieces: sorted by (tensor, row); a tensor has at least one, a tensor without elements exactly one.
        loads: elements per rank.
        padding: largest load over the mean, minus 1; 0 if there are no elements.
    """

    pieces: tuple[Piece, ...]
    loads: tuple[int, ...]
    padding: float


@dataclass(frozen=True)
class BucketPlan:
    """Tensors that are exchanged together.

    Attributes:
        tensors: their indices, in the order given.
        pieces: sorted by (owner, tensor, row): the layout of the bucket, where the slice of each rank is contiguous.
    """

    tensors: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Plan:
    """Buckets in the order in which they fill.

    Attributes:
        loads: elements per rank over all buckets.
        padding: largest load over the mean, minus 1; 0 if there are no elements.
        busiest: the busiest owner's load over the mean, in the worst bucket.
    """

    buckets: tuple[BucketPlan, ...]
    loads: tuple[int, ...]
    padding: float
    busiest: float


def partition(
    shapes: Sequence[Sequence[int]], ranks: int, limit: float = 0.05, carried: Sequence[int] | None = None, whole: Collection[int] = ()
) -> Partition:
    """FP8-LM Algorithm 1, with tensors cut along dim 0 until the padding is at most `limit`.

    At first the largest allowed piece is the largest tensor, so that nothing is cut. A tensor above it is cut into ceil(size / allowed)
    pieces, longer ones first. Pieces are assigned in the order (-size, tensor, row) to the rank with the smallest load, ties to the lowest
    rank. While the padding is above `limit`, the allowed piece is halved. If `limit` cannot be reached (rows are not cut), the best cut so
    far is returned: the smallest padding, then the fewest pieces.

    Args:
        shapes: of the tensors; a 0-dim tensor counts as one row.
        limit: largest acceptable padding; `math.inf` keeps every tensor whole.
        carried: elements that the ranks already have, [ranks]: among equal loads, a piece goes to the rank with the fewest.
        whole: numbers of tensors that must not be cut.
    """
    carried = [0] * ranks if carried is None else carried
    rows = [shape[0] if shape else 1 for shape in shapes]
    widths = [math.prod(shape[1:]) for shape in shapes]
    sizes = [height * width for height, width in zip(rows, widths, strict=True)]
    total, largest = sum(sizes), max(sizes, default=0)
    # The largest indivisible piece: no partition can give the busiest rank less.
    uncut = max((size if i in whole else width for i, (width, size) in enumerate(zip(widths, sizes, strict=True)) if size), default=0)
    floor = max(-(-total // ranks), uncut)

    def accepted(load: int) -> bool:
        return load <= floor or load / (total / ranks) - 1 <= limit

    cuttable = [i for i, size in enumerate(sizes) if size and i not in whole]
    best: Partition | None = None
    for halvings in itertools.count():
        counts = [1] * len(sizes)
        for i in cuttable:
            counts[i] = min(rows[i], -(-(sizes[i] << halvings) // largest))
        longest = max((-(-height // count) * width for height, width, count in zip(rows, widths, counts, strict=True)), default=0)
        if not accepted(longest):
            continue  # the rank that gets this piece would have too much
        cuts = _greedy(rows, widths, counts, carried)
        if best is None or cuts.padding < best.padding:
            best = cuts
        if accepted(max(cuts.loads)) or all(counts[i] == rows[i] for i in cuttable):
            break
    assert best is not None
    return best


def plan_buckets(
    shapes: Sequence[Sequence[int]],
    kinds: Sequence[Hashable],
    ranks: int,
    bucket_elements: int = 2**27,
    *,
    bucket_limit: float = 0.25,
    limit: float = 0.05,
    whole: Collection[int] = (),
) -> Plan:
    """Group tensors into buckets and assign each bucket's rows to owners, with little padding per bucket and less over all of them.

    A bucket is a run of tensors of one kind with at most `bucket_elements` elements in total, or one larger tensor. Each bucket is
    partitioned separately within `bucket_limit`, so that no rank waits long for a bucket's busiest owner; ranks with the smallest load come
    first. While the padding over all buckets is above `limit`, everything is planned again with `bucket_limit` halved, down to `limit`. If
    every bucket is within a limit, so are all of them together; so in the end only buckets that cannot be balanced are above it, and
    cutting the others further would not help. The plan with the smallest padding is returned; among equals, the one with the fewest pieces.

    Args:
        shapes: of the tensors, in the order in which backward produces their gradients.
        kinds: one per tensor, such as its wire format; tensors of different kinds never share a bucket.
        whole: numbers of tensors that must not be cut, whatever padding results.

    Raises:
        ValueError: if `bucket_elements` is below 1.
    """
    if bucket_elements < 1:
        raise ValueError(f"bucket_elements is {bucket_elements}; it must be at least 1: pass the elements per bucket")
    buckets = _buckets([math.prod(shape) for shape in shapes], kinds, bucket_elements)
    plan = _plan(shapes, buckets, ranks, bucket_limit, whole)
    while plan.padding > limit and bucket_limit > limit:
        bucket_limit = max(bucket_limit / 2, limit)
        plan = min(plan, _plan(shapes, buckets, ranks, bucket_limit, whole), key=lambda plan: plan.padding)
    return plan


def numbered(bucket: BucketPlan, numbers: Sequence[int]) -> BucketPlan:
    """Return a bucket of a plan over some tensors of a longer list, with their `numbers` in that list."""
    pieces = tuple(piece._replace(tensor=numbers[piece.tensor]) for piece in bucket.pieces)
    return BucketPlan(tuple(numbers[i] for i in bucket.tensors), pieces)


def _greedy(rows: Sequence[int], widths: Sequence[int], counts: Sequence[int], carried: Sequence[int]) -> Partition:
    """Cut tensors of rows x width elements into `counts` pieces each; assign the largest piece first, to the least loaded rank."""
    cut = []
    for tensor, (height, width, count) in enumerate(zip(rows, widths, counts, strict=True)):
        shorter, longer_ones = divmod(height, count)
        for i in range(count):
            length = shorter + (i < longer_ones)
            cut.append((-length * width, tensor, i * shorter + min(i, longer_ones), length))
    cut.sort()
    heap = sorted((0, held, rank) for rank, held in enumerate(carried))
    pieces = []
    for size, tensor, row, length in cut:
        load, held, rank = heap[0]
        heapq.heapreplace(heap, (load - size, held, rank))
        pieces.append(Piece(tensor, row, length, rank))
    pieces.sort()
    loads = tuple(load for load, _, _ in sorted(heap, key=lambda entry: entry[2]))
    return Partition(tuple(pieces), loads, _padding(loads))


def _padding(loads: Sequence[int]) -> float:
    return max(loads) / (sum(loads) / len(loads)) - 1 if any(loads) else 0.0


def _buckets(sizes: Sequence[int], kinds: Sequence[Hashable], bucket_elements: int) -> list[list[int]]:
    """Return runs of tensors of one kind, ordered by their last tensor."""
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    buckets = []
    for tensor, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if kind not in filled or filled[kind] + size > bucket_elements:
            open_buckets[kind], filled[kind] = [], 0
            buckets.append(open_buckets[kind])
        open_buckets[kind].append(tensor)
        filled[kind] += size
    return sorted(buckets, key=lambda bucket: bucket[-1])


def _plan(
    shapes: Sequence[Sequence[int]], buckets: Sequence[Sequence[int]], ranks: int, bucket_limit: float, whole: Collection[int]
) -> Plan:
    loads = [0] * ranks
    plans = []
    busiest = 1.0
    for bucket in buckets:
        uncut = [place for place, tensor in enumerate(bucket) if tensor in whole]
        part = partition([shapes[tensor] for tensor in bucket], ranks, bucket_limit, loads, uncut)
        pieces = sorted((piece._replace(tensor=bucket[piece.tensor]) for piece in part.pieces), key=lambda p: (p.owner, p.tensor, p.row))
        plans.append(BucketPlan(tuple(bucket), tuple(pieces)))
        loads = [load + more for load, more in zip(loads, part.loads, strict=True)]
        busiest = max(busiest, 1 + part.padding)
    return Plan(tuple(plans), tuple(loads), _padding(loads), busiest)
