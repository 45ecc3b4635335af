"""The collectives between sequence- and tensor-parallel regions: converter g and its conjugate (FP8-LM section 2.3, Figure 2).

Rows are gathered and partial sums are reduced, after a cast to FP8. Without sequence parallelism nothing is gathered, and an all-reduce
replaces the reduce-scatter.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from msamp.comm.collectives import Peers, Pending
from msamp.kernels import ops
from msamp.nn.cast_scales import CastScales
from msamp.nn.gemm import RowProduct, cast_operand
from msamp.numerics.recipe import Cast

KIND = "activation"


def shared_amax(amax: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Return the maximum of `amax` (FP32, 0-dim, changed in place) over all ranks, so that they share one scale."""
    return peers.all_reduce(amax, dist.ReduceOp.MAX, "the amax of an activation", KIND, "amax all-reduce")


def gathered_shape(shape: Sequence[int], peers: Peers) -> tuple[int, ...]:
    """Return the shape of the whole tensor whose dim 0 is split evenly over the ranks."""
    return (shape[0] * peers.ranks, *shape[1:])


class GatheredRows:
    """The rows of all ranks while they are gathered: `msamp.nn.ends.PendingRows` for a collective."""

    def __init__(self, pending: Pending, own: torch.Tensor, peers: Peers) -> None:
        self._pending, self._own, self._peers = pending, own, peers

    def __call__(self) -> torch.Tensor:
        return self._pending.wait().view(gathered_shape(self._own.shape, self._peers))

    def product(self, product: RowProduct) -> torch.Tensor:
        """Return the product of all rows. While copies bring the others, this rank's own rows are multiplied; NCCL's kernels would compete
        with that GEMM for multiprocessors."""
        if not self._peers.copies:
            return product.of(self())
        rows, rank = self._own.shape[0], self._peers.rank
        out = product.empty(self._own, rows * self._peers.ranks)
        product.write(out[rank * rows : (rank + 1) * rows], self._own)
        whole = self()
        for others in _others(rows, rank, self._peers.ranks):
            product.write(out[others], whole[others])
        return out

    def keep(self) -> torch.Tensor:
        return self._pending.keep().view(gathered_shape(self._own.shape, self._peers))

    def done(self) -> None:
        self._pending.done()


def start_gather(payload: torch.Tensor, peers: Peers, label: str) -> GatheredRows:
    """Start an all-gather of rows, the same number from each rank.

    Args:
        payload: contiguous [M, N], any dtype; FP8 is sent as 1 byte per element.
        peers: the ranks.
        label: the name under which bytes are counted, such as "input all-gather".

    Returns:
        The pending [ranks M, N], in the order of the ranks. On a GPU only the stream waits for it.
    """
    pending = peers.start_all_gather(payload.view(-1), [payload.numel()] * peers.ranks, f"an activation ({label})", KIND, label)
    return GatheredRows(pending, payload, peers)


def _others(rows: int, rank: int, ranks: int) -> list[slice]:
    """Return the rows of the ranks before and after this one, of which each rank has `rows`."""
    parts = (slice(0, rank * rows), slice((rank + 1) * rows, ranks * rows))
    return [part for part in parts if part.stop > part.start]


def sum_product(product: RowProduct, codes: torch.Tensor, peers: Peers, role: str) -> torch.Tensor:
    """Compute this rank's partial sums, the product of `codes` [M, K], and reduce-scatter them as `start_sum` does, in the product's dtype.

    The rows of the other ranks are computed first, and copied to them while this rank computes its own.

    Returns:
        This rank's block of M / ranks rows.
    """
    rows = codes.shape[0] // peers.ranks
    own, partial = slice(peers.rank * rows, (peers.rank + 1) * rows), product.empty(codes, codes.shape[0])
    for others in _others(rows, peers.rank, peers.ranks):
        product.write(partial[others], codes[others])
    sizes = [rows * partial.shape[1]] * peers.ranks
    pending = peers.start_all_to_all(partial.view(-1), sizes, f"the partial sums of {role}", KIND, f"{role} reduce-scatter")
    product.write(partial[own], codes[own])
    received = pending.wait().view(peers.ranks, sizes[0])
    summed = ops.sum_payloads(received, None, partial.dtype, partial[own].view(-1), peers.rank)
    pending.done()
    return summed.view(rows, partial.shape[1])


def start_sum(
    partial: torch.Tensor, peers: Peers, role: str, *, scatter: bool, wire: tuple[CastScales, Cast] | None = None
) -> Callable[[], torch.Tensor]:
    """Start the sum of the ranks' partial sums of a GEMM.

    In FP8, each rank casts its partial sum with the shared scale and sends every other rank its slice. The receiver sums the payloads in
    FP32, in rank order. For an all-reduce, the slices are cast again and gathered, with a scale that is smaller, so that ranks times the
    largest payload fits.

    Args:
        partial: contiguous [M, N] FP32, BF16 or FP16; overwritten if NCCL sums it.
        peers: the ranks.
        role: "output" or "grad_input"; bytes are counted under "{role} reduce-scatter" or "{role} all-reduce".
        scatter: return each rank's block of M / ranks rows, where M is a multiple of the ranks; otherwise the whole sum.
        wire: slot and cast of this rank's partial sum, with one scale per tensor. None: it is sent in the dtype of `partial`. NCCL then
            sums it itself; copies and other backends sum in FP32 in rank order and round once.

    Returns:
        A function that waits (on a GPU only the stream waits) and returns [M / ranks, N] or [M, N] in the dtype of `partial`; the whole sum
        is bitwise the same on all ranks.
    """
    if peers.ranks == 1:
        return lambda: partial
    label, what = f"{role} {'reduce-scatter' if scatter else 'all-reduce'}", f"the partial sums of {role}"
    even, more = divmod(partial.numel(), peers.ranks)
    sizes = [even + (rank < more) for rank in range(peers.ranks)]
    shape = (partial.shape[0] // peers.ranks if scatter else partial.shape[0], partial.shape[1])
    if wire is None and peers.nccl and not (scatter and peers.copies):
        if scatter:
            summed = peers.reduce_scatter(partial.view(-1), sizes, what, KIND, label)
        else:
            summed = peers.all_reduce(partial, dist.ReduceOp.SUM, what, KIND, label)
        return lambda: summed.view(shape)
    payload, scale_inv, dtype = partial, None, partial.dtype
    if wire is not None:
        slot, cast = wire
        operand = cast_operand(partial, slot, cast, combine=lambda amax: shared_amax(amax, peers))
        payload, scale_inv = operand.codes, operand.scale_inv
    pending = peers.start_all_to_all(payload.view(-1), sizes, what, KIND, label)

    def finish() -> torch.Tensor:
        received = pending.wait().view(peers.ranks, sizes[peers.rank])
        own = payload.view(-1).split(sizes)[peers.rank] if pending.lacks_own else None
        room = 2.0 ** (peers.ranks - 1).bit_length()
        if scatter:
            factor, fmt = scale_inv, dtype
        elif scale_inv is None:
            factor, fmt = None, dtype
        else:
            factor, fmt = torch.full_like(scale_inv, 1.0 / room), cast.format.dtype
        summed = ops.sum_payloads(received, factor, fmt, own, peers.rank)
        pending.done()
        if scatter:
            return summed.view(shape)
        gathered = peers.start_all_gather(summed, sizes, f"the sums of {role}", KIND, label)
        if scale_inv is None:
            return gathered.keep().view(shape)
        whole = ops.sum_payloads(gathered.wait().view(1, -1), scale_inv * room, dtype).view(shape)
        gathered.done()
        return whole

    return finish
