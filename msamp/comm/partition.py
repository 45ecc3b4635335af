"""Which rank owns which rows of which tensor (FP8-LM 2.3, Algorithm 1), as pure functions of sizes.

Algorithm 1 gives tensors, largest first, to the rank with the least load. With fewer tensors than ranks, or few more, whole tensors
balance badly (GPT-345M on 128 ranks: the busiest holds 78 % more than the mean), so what is too large is cut along dim 0.
Loads are counted in elements throughout.
"""

import heapq
import itertools
import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """Rows [row, row + rows) along dim 0 of tensor number `tensor`, held by rank `owner`."""

    tensor: int
    row: int
    rows: int
    owner: int


@dataclass(frozen=True)
class Partition:
    """Every row of every tensor exactly once.

    Attributes:
        pieces: sorted by (tensor, row); a tensor has at least one, a tensor without elements exactly one.
        loads: elements a rank.
        padding: largest load over the mean, less 1; 0 where there are no elements.
    """

    pieces: tuple[Piece, ...]
    loads: tuple[int, ...]
    padding: float


@dataclass(frozen=True)
class BucketPlan:
    """Tensors that are exchanged together.

    Attributes:
        tensors: their indices, in the order given.
        pieces: sorted by (owner, tensor, row): the layout of the bucket, in which the slice of each rank is contiguous.
    """

    tensors: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Plan:
    """Buckets in the order in which they fill.

    Attributes:
        loads: elements a rank over all buckets.
        padding: largest load over the mean, less 1; 0 where there are no elements.
        busiest: the largest, over buckets, of what the busiest owner receives over the mean.
    """

    buckets: tuple[BucketPlan, ...]
    loads: tuple[int, ...]
    padding: float
    busiest: float


def partition(
    shapes: Sequence[Sequence[int]],
    ranks: int,
    limit: float = 0.05,
    carried: Sequence[int] | None = None,
    whole: Collection[int] = (),
) -> Partition:
    """FP8-LM Algorithm 1, with tensors cut along dim 0 until the padding is at most `limit`.

    The largest allowed piece starts at the largest tensor, so that nothing is cut; a tensor above it is cut into ceil(size / allowed)
    pieces, longer ones first, and pieces go by (-size, tensor, row) to the rank with the least load, ties to the lowest rank. While the
    padding is above `limit`, the allowed piece is halved. Where `limit` is out of reach (a row is not cut), the best cut on that way is
    returned: the least padding, then the fewest pieces.

    Args:
        shapes: of the tensors; a 0-dim tensor counts as one row.
        limit: largest padding to accept; `math.inf` keeps every tensor whole.
        carried: elements the ranks hold already, [ranks]: between equal loads the piece goes to the rank that carries least.
        whole: numbers of tensors that are not cut.

    Raises:
        ValueError: `ranks` below 1, `limit` not above 0, or not one entry of `carried` a rank.
    """
    _check(ranks, limit=limit)
    carried = [0] * ranks if carried is None else carried
    if len(carried) != ranks:
        raise ValueError(f"carried has {len(carried)} entries for {ranks} ranks: give one number of elements a rank, or None")
    rows = [shape[0] if shape else 1 for shape in shapes]
    widths = [math.prod(shape[1:]) for shape in shapes]
    sizes = [height * width for height, width in zip(rows, widths, strict=True)]
    total, largest = sum(sizes), max(sizes, default=0)
    floor = max(-(-total // ranks), _largest_uncut(widths, sizes, whole))

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
            continue  # the rank that gets that piece has too much already
        found = _greedy(rows, widths, counts, carried)
        if best is None or found.padding < best.padding:
            best = found
        if accepted(max(found.loads)) or all(counts[i] == rows[i] for i in cuttable):
            break
    assert best is not None
    return best


def _largest_uncut(widths: Sequence[int], sizes: Sequence[int], whole: Collection[int]) -> int:
    """Elements of the largest row or whole tensor, below which no cut brings the busiest rank."""
    return max((size if i in whole else width for i, (width, size) in enumerate(zip(widths, sizes, strict=True)) if size), default=0)


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
    """Group tensors into buckets and give each bucket's rows to owners: little padding in every bucket, less over all of them.

    A bucket is a run of tensors of one kind of at most `bucket_elements` elements together, or one larger tensor. Each is partitioned by
    itself within `bucket_limit` (no rank waits long for the busiest owner of a bucket), ranks that carry least first. Where the padding
    over all buckets is above `limit`, everything is planned again with `bucket_limit` halved, down to `limit` itself. Buckets that each
    keep a limit keep it together, so only buckets that cannot be balanced are left above it, and cutting the others further would not help.
    The plan with the least padding is returned; among equals, the one with the fewest pieces.

    Args:
        shapes: of the tensors, in the order in which their gradients appear in backward.
        kinds: one a tensor, such as its wire format; tensors of different kinds never share a bucket.
        whole: numbers of tensors that are not cut, as far as the padding then goes.

    Raises:
        ValueError: `ranks` or `bucket_elements` below 1, a limit not above 0, or not one kind a tensor.
    """
    _check(ranks, bucket_limit=bucket_limit, limit=limit)
    if bucket_elements < 1:
        raise ValueError(f"bucket_elements is {bucket_elements}, legal is 1 or more: give the elements of a bucket")
    if len(kinds) != len(shapes):
        raise ValueError(f"{len(kinds)} kinds for {len(shapes)} shapes: give one kind a tensor")
    buckets = _buckets([math.prod(shape) for shape in shapes], kinds, bucket_elements)
    plan = _plan(shapes, buckets, ranks, bucket_limit, whole)
    while plan.padding > limit and bucket_limit > limit:
        bucket_limit = max(bucket_limit / 2, limit)
        plan = min(plan, _plan(shapes, buckets, ranks, bucket_limit, whole), key=lambda plan: plan.padding)
    return plan


def _check(ranks: int, **limits: float) -> None:
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, legal is 1 or more: give the number of ranks that share the tensors")
    for name, limit in limits.items():
        if not limit > 0:
            raise ValueError(
                f"{name} is {limit}, legal is above 0: give the largest padding to accept as a share of the mean, such as 0.05"
            )


def _greedy(rows: Sequence[int], widths: Sequence[int], counts: Sequence[int], carried: Sequence[int]) -> Partition:
    """Tensors of rows x width elements in `counts` pieces each, largest piece first to the least loaded rank."""
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
    """Runs of tensors of one kind, ordered by their last tensor."""
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
