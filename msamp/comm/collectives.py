"""The collectives of a group of ranks: any dtype over any backend, bytes counted, and a lost rank named."""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Early: its functions keep the group of the moment as their default (see WithGroup), and the first optimizer made imports it too (by way of
# torch.compile), usually when there is one.
import torch.distributed.nn.functional

from msamp.comm.bucket import as_bytes
from msamp.comm.counters import WireBytes, all_gather_sent, all_reduce_sent, all_to_all_sent

ROLL_CALL_SECONDS = 5.0  # how long a rank that saw a collective fail waits for the others to say that they are alive

T = TypeVar("T")


class WithGroup:
    """Something that talks over a process group, which it does not keep alive: one that outlives destroy_process_group() leaves gloo's
    threads running into the interpreter's end, where one that still drops a tensor aborts the process (1 of 4 runs on a busy machine).

    Args:
        group: None is this process alone.
    """

    destroyed = "the process group was destroyed while gradients or weights were still to be exchanged"  # the error of `group`

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None else weakref.ref(group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; RuntimeError where it has been destroyed."""
        group = None if self._group is None else self._group()
        if group is None and self._group is not None:
            raise RuntimeError(self.destroyed)
        return group


class Peers(WithGroup):
    """The ranks of a group, as seen from this one. With one rank no collective is run.

    Over gloo everything goes by all-to-all, where each rank talks to each: a lost rank fails all others at once, while in
    a ring those that are not its neighbours go on waiting and look lost themselves.

    Args:
        group: None is this process alone.
        sent: where the bytes that this rank sends are counted.

    Attributes:
        copies: whether slices travel by copies into the peers' memory (`msamp.comm.copies`).
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
        """`x` combined over the ranks, in place; NCCL also sums float8 (each hop rounds and saturates).

        Its bytes are counted under `label` of `kind`, as in all methods below; `kind` None counts nothing.
        """
        if self.ranks > 1:
            run = dist.all_reduce if self.nccl else _all_reduce_by_exchange
            self.run(lambda: run(x, op, self.group), f"all-reduce of {what}")
            if kind is not None:
                self.sent.add(kind, label, all_reduce_sent(x.nbytes, self.ranks))
        return x

    def all_to_all(self, flat: torch.Tensor, sizes: Sequence[int], what: str, kind: str = "weight") -> torch.Tensor:
        """Slice r of `flat` (`sizes[r]` elements) goes to rank r; returns this rank's slice of every rank, [ranks, n]."""
        received = self.start_all_to_all(flat, sizes, what, kind, async_op=False).wait()
        return received.view(self.ranks, sizes[self.rank])

    def start_all_to_all(
        self,
        flat: torch.Tensor,
        sizes: Sequence[int],
        what: str,
        kind: str = "weight",
        label: str = "all-to-all",
        async_op: bool = True,
    ) -> "Pending":
        """`all_to_all` on its way; its result is flat, rank after rank."""
        if self.ranks == 1:
            return Pending(self, flat)
        received = torch.empty(self.ranks * sizes[self.rank], dtype=flat.dtype, device=flat.device)
        counts = [n * flat.element_size() for n in sizes]
        own = [counts[self.rank]] * self.ranks
        what = f"all-to-all of {what}"
        work = self.run(lambda: dist.all_to_all_single(as_bytes(received), as_bytes(flat), own, counts, self.group, async_op), what)
        self.sent.add(kind, label, all_to_all_sent(counts, self.rank))
        return Pending(self, received, work, what)

    def all_gather(
        self, own: torch.Tensor, sizes: Sequence[int], what: str, kind: str = "weight", label: str = "all-gather"
    ) -> torch.Tensor:
        """The flat buffer from every rank's slice (`sizes[r]` elements of rank r)."""
        return self.start_all_gather(own, sizes, what, kind, label, async_op=False).wait()

    def start_all_gather(
        self,
        own: torch.Tensor,
        sizes: Sequence[int],
        what: str,
        kind: str = "weight",
        label: str = "all-gather",
        async_op: bool = True,
    ) -> "Pending":
        """`all_gather` on its way."""
        if self.ranks == 1:
            return Pending(self, own)
        flat = torch.empty(sum(sizes), dtype=own.dtype, device=own.device)
        whole, mine = as_bytes(flat), as_bytes(own)
        counts = [n * own.element_size() for n in sizes]

        def run() -> dist.Work | None:
            if not self.nccl:
                return dist.all_to_all_single(whole, mine.repeat(self.ranks), counts, None, self.group, async_op)
            if len(set(counts)) == 1:
                return dist.all_gather_into_tensor(whole, mine, self.group, async_op)
            # Point to point: nothing is padded to the largest slice.
            return dist.all_to_all(list(whole.split(counts)), [mine] * self.ranks, self.group, async_op)

        what = f"all-gather of {what}"
        work = self.run(run, what)
        self.sent.add(kind, label, all_gather_sent(own.nbytes, self.ranks))
        return Pending(self, flat, work, what)

    def reduce_scatter(
        self, flat: torch.Tensor, sizes: Sequence[int], what: str, kind: str = "weight", label: str = "reduce-scatter"
    ) -> torch.Tensor:
        """NCCL's own sum in the dtype of `flat`; this rank keeps its slice."""
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
        """Run a collective; RuntimeError naming it, and the ranks that do not answer, where it fails."""
        try:
            return collective()
        except RuntimeError as error:
            lost = self.missing()
            names = f"rank {', '.join(map(str, lost))} does not answer" if lost else "every rank still answers"
            first = str(error).strip().partition("\n")[0]
            raise RuntimeError(f"rank {dist.get_rank()}: the {what} failed: {names} ({first})") from error

    def missing(self) -> list[int]:
        """Global ranks of the group that do not report to the rendezvous store within `ROLL_CALL_SECONDS` each; to be called on every
        rank, after a collective has failed."""
        store = dist.PrefixStore("msamp/roll-call", dist.distributed_c10d._get_default_store())
        others = [r for r in dist.get_process_group_ranks(self.group) if r != dist.get_rank()]
        lost = []
        try:
            store.set(str(dist.get_rank()), "alive")
        except RuntimeError:
            return [0]  # the store is gone, and it lives with rank 0
        for rank in others:
            try:
                store.wait([str(rank)], timedelta(seconds=ROLL_CALL_SECONDS))
            except RuntimeError:
                lost.append(rank)
        return lost


class Pending:
    """The result of a collective that is on its way.

    Attributes:
        lacks_own: whether this rank's own slice of an all-to-all is not in the result.

    Args:
        peers: the ranks of the collective.
        result: filled once it has ended.
        work: torch's handle; None where it has ended already.
        what: its name in messages.
    """

    lacks_own = False

    def __init__(self, peers: Peers, result: torch.Tensor, work: dist.Work | None = None, what: str = "") -> None:
        self._peers, self._result, self._work, self._what = peers, result, work, what

    def wait(self) -> torch.Tensor:
        """The result. On a GPU the current stream waits for it and the host does not; RuntimeError as `Peers.run`."""
        if self._work is not None:
            self._peers.run(self._work.wait, self._what)
            self._work = None
        return self._result

    def keep(self) -> torch.Tensor:
        """The result in memory that later collectives leave alone; after it `done` does nothing."""
        return self.wait()

    def done(self) -> None:
        """The current stream has every kernel that reads the result: a later collective may write its memory. Call it once, after the last
        such kernel; what was read from `wait` must not be read any more. Only memory that ranks share needs it (`msamp.comm.copies`)."""


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
