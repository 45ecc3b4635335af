"""Collectives for any dtype over any backend, which count their bytes and name lost ranks."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Imported early: its functions bind the default group at import as a default argument (see WithGroup). Otherwise the first optimizer would
# import it (through torch.compile), usually when a group exists.
import torch.distributed.nn.functional

from msamp.comm.bucket import as_bytes
from msamp.comm.counters import WireBytes, all_gather_sent, all_reduce_sent, all_to_all_sent

ROLL_CALL_SECONDS = 5.0  # after a failed collective: how long to wait for another rank to report that it is alive

T = TypeVar("T")


class WithGroup:
    """Base class of objects that communicate over a process group. They reference the group weakly: a group that outlives
    destroy_process_group() leaves gloo's threads running until the interpreter shuts down, where a thread that still frees a tensor aborts
    the process (1 of 4 runs on a busy machine).
    """

    destroyed = "the process group was destroyed while gradients or weights were still to be exchanged"  # the error of `group`

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None else weakref.ref(group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; RuntimeError if it has been destroyed."""
        group = None if self._group is None else self._group()
        if group is None and self._group is not None:
            raise RuntimeError(self.destroyed)
        return group


class Peers(WithGroup):
    """The collectives of a group, seen from one rank. A group of one rank runs none.

    Over gloo, every collective is an all-to-all, where each rank talks to each: if a rank is lost, all others fail at once. In a ring,
    ranks that are not its neighbours would keep waiting and look lost themselves.

    Args:
        group: the process group; None for a single process.
        sent: the counter of the bytes that this rank sends.

    Attributes:
        copies: whether slices are sent by copies into the other ranks' memory (`msamp.comm.copies`).
    """

    copies = False

    def __init__(self, group: dist.ProcessGroup | None, sent: WireBytes) -> None:
        super().__init__(group)
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.nccl = group is not None and self.ranks > 1 and dist.get_backend(group) == "nccl"
        self.sent = sent

    def all_reduce(
        self, x: torch.Tensor, op: dist.ReduceOp.RedOpType, what: str, kind: str | None = "weight", label: str = "all-reduce"
    ) -> torch.Tensor:
        """All-reduce `x` in place; NCCL also sums float8 (each hop rounds and saturates).

        Bytes are counted under `kind` and `label`, as in all methods below; `kind` None counts nothing.
        """
        if self.ranks > 1:
            run = dist.all_reduce if self.nccl else _all_reduce_by_exchange
            self.run(lambda: run(x, op, self.group), f"all-reduce of {what}")
            if kind is not None:
                self.sent.add(kind, label, all_reduce_sent(x.nbytes, self.ranks))
        return x

    def all_to_all(self, flat: torch.Tensor, sizes: Sequence[int], what: str, kind: str = "weight") -> torch.Tensor:
        """Send slice r of `flat` (`sizes[r]` elements) to rank r; return this rank's slice from every rank, [ranks, n]."""
        received = self.start_all_to_all(flat, sizes, what, kind, async_op=False).wait()
        return received.view(self.ranks, sizes[self.rank])

    def start_all_to_all(
        self, flat: torch.Tensor, sizes: Sequence[int], what: str, kind: str = "weight", label: str = "all-to-all", async_op: bool = True
    ) -> "Pending":
        """Start an `all_to_all`; its result is flat, rank after rank."""
        if self.ranks == 1:
            return Pending(self, flat)
        counts, what = [n * flat.element_size() for n in sizes], f"all-to-all of {what}"
        self.sent.add(kind, label, all_to_all_sent(counts, self.rank))
        if (pending := self._copied(flat, counts, what, gathers=False) if async_op else None) is not None:
            return pending
        received = torch.empty(self.ranks * sizes[self.rank], dtype=flat.dtype, device=flat.device)
        own = [counts[self.rank]] * self.ranks
        work = self.run(lambda: dist.all_to_all_single(as_bytes(received), as_bytes(flat), own, counts, self.group, async_op), what)
        return Pending(self, received, work, what)

    def _copied(self, x: torch.Tensor, counts: Sequence[int], what: str, *, gathers: bool) -> "Pending | None":
        """Start an all-gather or an all-to-all of `counts[r]` bytes from or to rank r by copies; None if this is done by the backend."""
        return None

    def all_gather(
        self, own: torch.Tensor, sizes: Sequence[int], what: str, kind: str = "weight", label: str = "all-gather"
    ) -> torch.Tensor:
        """All-gather every rank's slice (`sizes[r]` elements from rank r) into a flat buffer."""
        return self.start_all_gather(own, sizes, what, kind, label, async_op=self.copies).keep()

    def start_all_gather(
        self, own: torch.Tensor, sizes: Sequence[int], what: str, kind: str = "weight", label: str = "all-gather", async_op: bool = True
    ) -> "Pending":
        """Start an `all_gather`."""
        if self.ranks == 1:
            return Pending(self, own)
        counts, what = [n * own.element_size() for n in sizes], f"all-gather of {what}"
        self.sent.add(kind, label, all_gather_sent(own.nbytes, self.ranks))
        if (pending := self._copied(own, counts, what, gathers=True) if async_op else None) is not None:
            return pending
        flat = torch.empty(sum(sizes), dtype=own.dtype, device=own.device)
        whole, own_bytes = as_bytes(flat), as_bytes(own)

        def run() -> dist.Work | None:
            if not self.nccl:
                return dist.all_to_all_single(whole, own_bytes.repeat(self.ranks), counts, None, self.group, async_op)
            if len(set(counts)) == 1:
                return dist.all_gather_into_tensor(whole, own_bytes, self.group, async_op)
            # Point to point, so that no slice is padded to the largest.
            return dist.all_to_all(list(whole.split(counts)), [own_bytes] * self.ranks, self.group, async_op)

        return Pending(self, flat, self.run(run, what), what)

    def start_ring(self, own: torch.Tensor, what: str, kind: str, label: str) -> "Pending":
        """Start to send `own`, the same size on every rank, to the next rank; its result, in the same shape, is the previous rank's. The
        last rank's next is the first."""
        if self.ranks == 1:
            return Pending(self, own)
        return self.start_shift(own, torch.empty_like(own, memory_format=torch.contiguous_format), 1, what, kind, label)

    def start_shift(self, own: torch.Tensor, received: torch.Tensor, distance: int, what: str, kind: str, label: str) -> "Pending":
        """Start to send `own` to the rank `distance` after this one, the first following the last, while every rank does the same.

        Args:
            own: any size; ranks may send differently much.
            received: contiguous, the result, in size and dtype of what the rank `distance` before this one sends.
            distance: 1 to ranks - 1, or negative: the rank before this one, and so on.
            what, kind, label: as for the other collectives.
        """
        to, source = [0] * self.ranks, [0] * self.ranks
        to[(self.rank + distance) % self.ranks], source[(self.rank - distance) % self.ranks] = own.nbytes, received.nbytes
        whole, own_bytes = as_bytes(received.view(-1)), as_bytes(own.contiguous().view(-1))
        what = f"ring of {what}"
        work = self.run(lambda: dist.all_to_all_single(whole, own_bytes, source, to, self.group, True), what)
        self.sent.add(kind, label, own.nbytes)
        return Pending(self, received, work, what)

    def reduce_scatter(
        self, flat: torch.Tensor, sizes: Sequence[int], what: str, kind: str = "weight", label: str = "reduce-scatter"
    ) -> torch.Tensor:
        """Reduce-scatter with NCCL's sum in the dtype of `flat`; return this rank's slice."""
        own = torch.empty(sizes[self.rank], dtype=flat.dtype, device=flat.device)

        def run() -> None:
            if len(set(sizes)) == 1:
                dist.reduce_scatter_tensor(own, flat, group=self.group)
            else:
                dist.reduce_scatter(own, list(flat.split(list(sizes))), group=self.group)

        self.run(run, f"reduce-scatter of {what}")
        self.sent.add(kind, label, all_to_all_sent([n * flat.element_size() for n in sizes], self.rank))
        return own

    def run(self, collective: Callable[[], T], what: str) -> T:
        """Run a collective. If it fails, raise a RuntimeError that names it and the ranks that do not answer."""
        try:
            return collective()
        except RuntimeError as error:
            lost = self.missing()
            names = f"rank {', '.join(map(str, lost))} does not answer" if lost else "every rank still answers"
            first = str(error).strip().partition("\n")[0]
            raise RuntimeError(f"rank {dist.get_rank()}: the {what} failed: {names} ({first})") from error

    def missing(self) -> list[int]:
        """Return the global ranks of the group that do not report to the rendezvous store within `ROLL_CALL_SECONDS` each. Every rank calls
        this after a collective has failed."""
        store = dist.PrefixStore("msamp/roll-call", dist.distributed_c10d._get_default_store())
        others = [r for r in dist.get_process_group_ranks(self.group) if r != dist.get_rank()]
        lost = []
        try:
            store.set(str(dist.get_rank()), "alive")
        except RuntimeError:
            return [0]  # the store is gone, and rank 0 hosts it
        for rank in others:
            try:
                store.wait([str(rank)], timedelta(seconds=ROLL_CALL_SECONDS))
            except RuntimeError:
                lost.append(rank)
        return lost


class Pending:
    """The result of a collective that has been started.

    Attributes:
        lacks_own: whether the result of an all-to-all lacks this rank's own slice.

    Args:
        peers: the ranks of the collective.
        result: filled when the collective has finished.
        work: torch's handle; None if it has finished already.
        what: its name in messages.
    """

    lacks_own = False

    def __init__(self, peers: Peers, result: torch.Tensor, work: dist.Work | None = None, what: str = "") -> None:
        self._peers, self._result, self._work, self._what = peers, result, work, what

    def wait(self) -> torch.Tensor:
        """Return the result. On a GPU the current stream waits for it and the host does not; RuntimeError as `Peers.run`."""
        if self._work is not None:
            self._peers.run(self._work.wait, self._what)
            self._work = None
        return self._result

    def keep(self) -> torch.Tensor:
        """Return the result in memory that later collectives do not overwrite; `done` does nothing afterwards."""
        return self.wait()

    def done(self) -> None:
        """Allow later collectives to overwrite the result, after the last kernel that reads it was launched on the current stream. Call it
        once, and do not read what `wait` returned afterwards. Only memory that ranks share needs it (`msamp.comm.copies`)."""


def _all_reduce_by_exchange(x: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    rows = x.reshape(1, -1).repeat(dist.get_world_size(group), 1)
    received = torch.empty_like(rows)
    dist.all_to_all_single(as_bytes(received.view(-1)), as_bytes(rows.view(-1)), group=group)
    combine: dict[Any, Callable[..., torch.Tensor]] = {
        dist.ReduceOp.SUM: torch.sum,
        dist.ReduceOp.MIN: torch.amin,
        dist.ReduceOp.MAX: torch.amax,
    }
    x.copy_(combine[op](received, 0).view(x.shape))


class OtherRanks:
    """The ranks that average the gradients of some parameters, if not those of the rest of the model: experts under expert parallelism.

    N ranks share the experts of a layer, and each computes its experts for the tokens of all N. So an expert has C copies, fewer than the D
    data-parallel copies of the rest, and each copy's gradient already contains the tokens of N ranks. The gradient of the mean loss is the
    sum over the copies divided by D, whatever C is:

        average = (C / D) mean over the C copies

    Args:
        peers: the ranks, a subset of those that see different tokens; a single one averages nothing.
        params: the parameters, which share no bucket with others.
        weight: factor of the average, C / D.
    """

    def __init__(self, peers: Peers, params: Iterable[torch.Tensor], weight: float) -> None:
        self.peers, self.params, self.weight = peers, frozenset(params), weight
