"""Collectives between the GPUs of one host by NVLink copies, instead of NCCL's kernels.

NCCL moves bytes with ring kernels on the multiprocessors, which has two costs: its all-gather of an FP8 activation reaches 186 GB/s per
direction between two H200s, whose link has 450, and it takes multiprocessors from a concurrent GEMM. torch's symmetric memory, which all
ranks of a group have mapped, avoids both: each rank writes directly to the other ranks' memory with the copy engines. A collective then
requires only two barriers, kernels of a few microseconds on one multiprocessor:

    wait for the producer -> barrier: no rank reads this window anymore -> copies to the peers' windows -> barrier: all copies have arrived

Later collectives reuse a window. The first barrier makes this safe: it runs after everything that a rank has enqueued before, and thus
after the last kernels that read the window, if these have been enqueued. The reader declares this by `Pending.done`, in program order, the
same on every rank; `Window.take` raises for a window that was not released. It does not matter when Python or an autograd thread frees a
tensor.

This library computes the sums itself: each rank has the other ranks' partial sums in its memory and sums them in FP32 in rank order, in one
kernel (`ops.sum_payloads`). So the result equals an FP32 sum over any backend bit for bit, while NCCL's sum of BF16 rounds after each rank.

These collectives are ordered by their stream, and a CUDA graph can capture them once their windows exist, which an eager step creates. If a
rank is lost, the others wait in a barrier until the run's watchdog finds them, as in NCCL's kernels. Symmetric memory is a private API of
torch, so it is probed: `obstacle` returns why it is not available for a group.
"""

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from msamp.comm.bucket import as_bytes
from msamp.comm.collectives import Peers, Pending
from msamp.comm.counters import WireBytes
from msamp.kernels.cuda_graph import capturing, unregistrable

GATHER_WINDOWS = 3  # in backward, two gathers are pending while a GEMM still reads the one before
SUM_WINDOWS = 2
ARRIVED, COPIED = 0, 1  # channels of the barriers
PROBE_BYTES = 2**10
# Bytes per rank in an all-gather of the 1.3B model, rows of a GEMM that takes about as long as by NCCL, and the repetitions per timing.
SAMPLE_BYTES, SAMPLE_ROWS, REPEATS = 2**24, 3072, 20
TRANSPORTS = ("auto", "nccl", "copies")


def choose_peers(group: dist.ProcessGroup, sent: WireBytes, transport: str, *, measure: bool = True) -> tuple[Peers, str]:
    """Return the peers of a group for a transport, and one line with the transport and the reason. Collective unless `transport` is "nccl".

    Args:
        group: the ranks.
        sent: the counter of sent bytes.
        transport: one of `TRANSPORTS`; "nccl" is the group's own backend, whatever it is.
        measure: whether "auto" measures both transports if both are available; otherwise it chooses copies. They are measured in CUDA
            graphs: where NCCL's collectives cannot be captured, it chooses NCCL.

    Raises:
        ValueError: if copies are requested but not available, or fail `self_test`.
    """
    if transport == "nccl" or dist.get_world_size(group) == 1:
        return Peers(group, sent), f"by {dist.get_backend(group)}"
    why = obstacle(group)
    if why is not None:
        if transport == "copies":
            raise ValueError(f"transport 'copies' is not available, since {why}; choose nccl or auto")
        return Peers(group, sent), f"by {dist.get_backend(group)}: {why}"
    copies = CopyPeers(group, sent)
    why = self_test(CopyPeers(group, WireBytes()), Peers(group, WireBytes()))
    if why is not None:
        if transport == "copies":
            raise ValueError(f"transport 'copies': {why}; choose nccl or auto, and report it with the driver's version")
        return Peers(group, sent), f"by NCCL: {why}"
    if transport == "copies" or not measure:
        return copies, "by copies between the GPUs"
    if (why := unregistrable()) is not None:
        return Peers(group, sent), f"by NCCL: copies are not compared with it in a CUDA graph, since {why}"
    times = [_time_beside_a_gemm(peers) for peers in (Peers(group, WireBytes()), CopyPeers(group, WireBytes()))]
    slowest = torch.tensor(times, device="cuda", dtype=torch.float32)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    nccl, copied = slowest.tolist()
    size = f"{SAMPLE_BYTES / 2**20:g} MiB per rank"
    measured = f"an all-gather of {size} beside a GEMM takes {copied:.0f} us by copies, {nccl:.0f} us by NCCL"
    return (copies, f"by copies between the GPUs: {measured}") if copied < nccl else (Peers(group, sent), f"by NCCL: {measured}")


def self_test(copies: "CopyPeers", nccl: Peers) -> str | None:
    """Return why copies fail on this machine; None if they deliver the same bytes as NCCL. Collective, with the same answer on every rank.

    The test runs more gathers and all-to-alls than there are windows, as several micro-batches do; in inference mode, as in evaluation; and
    in a CUDA graph that is replayed with new data.
    """
    ranks, wrong = copies.ranks, []
    payload = torch.empty(ranks * PROBE_BYTES, dtype=torch.uint8, device="cuda")
    received = torch.empty(2, ranks * ranks * PROBE_BYTES, dtype=torch.uint8, device="cuda")

    def fill(seed: int) -> None:
        payload.copy_(torch.arange(payload.numel(), device="cuda").mul_(2 * copies.rank + 3).add_(seed).remainder_(251))

    def exchange(peers: Peers, out: torch.Tensor) -> None:
        """Run a gather and an all-to-all at the same time."""
        gather = peers.start_all_gather(payload, [payload.numel()] * ranks, "a sample", "activation")
        slices = peers.start_all_to_all(payload, [PROBE_BYTES] * ranks, "a sample", "activation")
        out.copy_(gather.wait())
        out[: payload.numel()].bitwise_xor_(slices.wait())
        if slices.lacks_own:  # its slice contains the previous exchange's bytes
            own = slice(peers.rank * PROBE_BYTES, (peers.rank + 1) * PROBE_BYTES)
            out[own].bitwise_xor_(slices.wait()[own]).bitwise_xor_(payload[own])
        gather.done()
        slices.done()

    def compare(when: str, seed: int, run: Callable[[], None]) -> None:
        fill(seed)
        run()
        exchange(nccl, received[1])
        if not received[0].equal(received[1]):
            wrong.append(when)

    for seed in range(2 * GATHER_WINDOWS):
        compare("in turn", seed, lambda: exchange(copies, received[0]))
    with torch.inference_mode():
        for seed in range(10, 10 + GATHER_WINDOWS):
            compare("in inference mode", seed, lambda: exchange(copies, received[0]))
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(GATHER_WINDOWS + 1):
            exchange(copies, received[0])
    for seed in range(20, 20 + GATHER_WINDOWS):
        compare("from a CUDA graph", seed, graph.replay)
    torch.cuda.synchronize()  # before the graph and its memory are freed
    results: list[Any] = [None] * ranks
    dist.all_gather_object(results, next(iter(wrong), None), copies.group)
    return next((f"copies delivered other bytes than NCCL {when} on rank {rank}" for rank, when in enumerate(results) if when), None)


def _time_beside_a_gemm(peers: Peers) -> float:
    """Return the mean time of a gather and of a GEMM that starts with it, in microseconds, as a training step has them: NCCL's kernels take
    multiprocessors from the GEMM, and a CUDA graph replays both without the host's time, of which copies need more."""
    payload = torch.zeros(SAMPLE_BYTES, dtype=torch.uint8, device="cuda")
    a, b = (torch.zeros(SAMPLE_ROWS, SAMPLE_ROWS, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def once() -> None:
        gathered = peers.start_all_gather(payload, [SAMPLE_BYTES] * peers.ranks, "a sample", "activation")
        torch.mm(a, b)
        gathered.wait()
        gathered.done()

    once()  # allocates what a capture cannot
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(REPEATS):
            once()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()  # raises the clocks
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / REPEATS


def links_disabled() -> bool:
    """Return whether NCCL's switch against direct links between GPUs is set in this process."""
    return os.environ.get("NCCL_P2P_DISABLE", "") not in ("", "0")


def obstacle(group: dist.ProcessGroup) -> str | None:
    """Return why the ranks of a group cannot copy to each other's memory, or must not; None if they can. Collective, with the same answer
    on every rank."""
    if dist.get_backend(group) != "nccl":
        return f"the group's backend is {dist.get_backend(group)}, not nccl"
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, (socket.gethostname(), links_disabled()), group)
    hosts = {host for host, _ in ranks}
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts"
    if any(disabled for _, disabled in ranks):  # a user sets NCCL's switch where direct links hang or corrupt data
        return "NCCL_P2P_DISABLE forbids direct copies between GPUs"
    return _unmapped(group)


def _unmapped(group: dist.ProcessGroup) -> str | None:
    """Return why torch cannot map the memory of other ranks, by trying it."""
    try:
        window = Window(group, PROBE_BYTES)
        window.handle.barrier(channel=ARRIVED)
        why = ""
    except (ImportError, AttributeError, RuntimeError) as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, why, group)
    return next((f"torch has no symmetric memory on rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer), None)


class Window:
    """A buffer of the same size on every rank of a group, mapped by all ranks. Creating it is collective, and not possible during a
    capture.

    Attributes:
        handle: torch's handle, with the barriers.
    """

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric  # lazy: it is private, and missing in older versions of torch

        self.size = size
        self._memory = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        self.handle = symmetric.rendezvous(self._memory, group)
        self._taken = False

    def of(self, rank: int, start: int, size: int) -> torch.Tensor:
        """Return `size` bytes of a rank's window from byte `start`, as uint8."""
        return self.handle.get_buffer(rank, (size,), torch.uint8, start)

    def take(self, rank: int) -> torch.Tensor:
        """Return this rank's whole window for the result of a collective; RuntimeError if the previous result was not released."""
        if self._taken:
            raise RuntimeError(
                "the result of a tensor-parallel collective was not released before its memory is needed again: this is a bug, please "
                "report it, and run with --tp-transport nccl"
            )
        self._taken = True
        return self.of(rank, 0, self.size)

    def give_back(self) -> None:
        """Release the window: all kernels that read it are enqueued on the current stream."""
        self._taken = False


class CopyPeers(Peers):
    """`Peers` whose all-gathers and all-to-alls of equal slices are copies; all other collectives are NCCL's.

    The result of a started collective is in a window until `Pending.done`; at most `GATHER_WINDOWS` gathers and `SUM_WINDOWS` all-to-alls
    of one size can be pending. The result of `start_all_to_all` lacks this rank's own slice, which the caller already has. `all_gather`
    returns new memory, and `all_to_all` is NCCL's.

    Args:
        group: ranks of one host for which `obstacle` is None.
        sent: the counter of sent bytes, the same as for NCCL's collectives.
    """

    copies = True

    def __init__(self, group: dist.ProcessGroup, sent: WireBytes) -> None:
        super().__init__(group, sent)
        self._windows: dict[tuple[str, int], list[Window]] = {}
        self._turn: dict[tuple[str, int], int] = {}
        self._stream = torch.cuda.Stream(priority=-1)  # with priority over GEMMs, which wait for its copies

    def _copied(self, x: torch.Tensor, counts: Sequence[int], what: str, *, gathers: bool) -> Pending | None:
        if len(set(counts)) > 1:
            return None
        size, codes = counts[0], as_bytes(x)
        # Starting with the next rank, so that no two ranks write to the same peer at the same time.
        others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        if gathers:
            window, parts = self._window("gather", size * self.ranks, GATHER_WINDOWS), [(peer, codes) for peer in (*others, self.rank)]
        else:
            slices = codes.split(size)
            window, parts = self._window("sum", size * self.ranks, SUM_WINDOWS), [(peer, slices[peer]) for peer in others]
        pending = self._copy(window, parts, size, x, what)
        pending.lacks_own = not gathers
        return pending

    def _window(self, role: str, size: int, count: int) -> Window:
        key = role, size
        if key not in self._windows:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"a CUDA graph is captured before an eager step exchanged {size} bytes, which allocates its memory; run a step first"
                )
            group = self.group
            assert group is not None
            self._windows[key] = [self.run(lambda: Window(group, size), f"allocating {size} bytes for a {role}") for _ in range(count)]
            self._turn[key] = 0
        turn = self._turn[key]
        self._turn[key] = (turn + 1) % count
        return self._windows[key][turn]

    def _copy(self, window: Window, parts: Sequence[tuple[int, torch.Tensor]], size: int, source: torch.Tensor, what: str) -> Pending:
        """Write each part (bytes) to this rank's slice of another rank's window, on a separate stream."""
        received = window.take(self.rank)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            window.handle.barrier(channel=ARRIVED)
            for peer, part in parts:
                window.of(peer, self.rank * size, size).copy_(part)
            window.handle.barrier(channel=COPIED)
            done = torch.cuda.Event()
            done.record()
        return _Copied(self, window, received.view(source.dtype), done, source, what)


class _Copied(Pending):
    """The result of copies. It keeps their sources alive until the stream that wrote them has waited; then they may be overwritten."""

    def __init__(
        self, peers: Peers, window: Window, result: torch.Tensor, copied: torch.cuda.Event, source: torch.Tensor, what: str
    ) -> None:
        super().__init__(peers, result, None, what)
        self._window: Window | None = window
        self._copied: torch.cuda.Event | None = copied
        self._source: torch.Tensor | None = source

    def wait(self) -> torch.Tensor:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = self._source = None
        return self._result

    def keep(self) -> torch.Tensor:
        if self._window is not None:
            self._result = self.wait().clone()
            self.done()
        return self._result

    def done(self) -> None:
        if self._window is not None:
            self._window.give_back()
            self._window = None
