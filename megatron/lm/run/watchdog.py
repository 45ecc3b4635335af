"""Identify the rank that blocks the others: each process reports its position, and one that waits too long reads the others'."""

import contextlib
import faulthandler
import itertools
import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch.distributed as dist

from megatron.lm.config import Config
from megatron.lm.processes.process_groups import device_waits
from megatron.lm.shell.exit_codes import lacks_memory, leave_at_once

BEAT_SECONDS = 5.0  # at most, between two reports of a process
ANSWER_SECONDS = 10.0  # how long the rendezvous store may take to return the position of each rank
FAILED_TOGETHER_SECONDS = 3.0  # how much later than this rank another may raise an error that all ranks raise
LAUNCHER_GONE_SECONDS = 120.0  # how long a step may still take once torchrun is dead
READING, IN_STEP = "reading data", "in a step"
LOW_LIMIT = 1024  # open files of a process; a lower limit may be why data workers send nothing
OUR_THREADS = ("heartbeat", "watchdog", "save")  # besides training


# Files with functions that wait for other ranks, or for a device that waits for them.
WAITING_IN = ("distributed_c10d.py", "comm/collectives.py", "p2p_communication.py", "optim/device_flag.py")


class Whereabouts(NamedTuple):
    """A rank's position: iteration, phase, seconds in this phase, and time of the report (seconds since 1970).

    `waits`: whether it waits for other ranks, judging by its Python stack.
    """

    iteration: int
    phase: str
    seconds: float
    time: float
    waits: bool = False


class Watchdog:
    """Two threads during `watching`; with a single process only the second.

    One writes this rank's position to the rendezvous store. The other exits the process, with code 1 and a line on stderr that names the
    stuck rank, if this rank has not advanced for `timeout` seconds. The first to notice writes the line to the store, and the others print
    the same. A stopped or spinning process never joins a collective, so unwinding would hang.

    Processes leave after the step in which their torchrun was killed (`signals.Requests`). A step that never ends, because its collectives
    do not, would hold the GPU for the whole timeout: it ends after `LAUNCHER_GONE_SECONDS`.

    With NCCL the device waits in a collective, not the host: after an error on one rank nothing raises on the others, and even destroying
    the process group waits for the device. `failed_alone` notifies the others, which exit as above.

    Args:
        timeout: seconds; a step, a checkpoint and a batch of an evaluation must take less.
        rank, ranks: rank of this process, and number of ranks.
    """

    def __init__(self, timeout: float, rank: int, ranks: int) -> None:
        self.timeout, self.rank, self.ranks = timeout, rank, ranks
        self.beat = min(BEAT_SECONDS, timeout / 8)
        self.iteration, self.phase = 0, "starting"
        self._moves, self._since = 0, time.monotonic()
        self._ended, self._stalled, self._reported = threading.Event(), threading.Event(), threading.Event()
        self._verdict = ""
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @classmethod
    def of(cls, config: Config) -> "Watchdog":
        """Return the watchdog of this process, with the timeout of `--distributed-timeout-minutes`."""
        return cls(60 * config.parallel.distributed_timeout_minutes, dist.get_rank(), dist.get_world_size())

    def at(self, phase: str, iteration: int | None = None) -> None:
        """Report that this rank is in `phase` of an iteration (None: the same as before)."""
        self.phase, self.iteration = phase, self.iteration if iteration is None else iteration
        self._moves, self._since = self._moves + 1, time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        self._ended.clear()
        self.at("starting")
        threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if self.ranks > 1:
            threads.append(threading.Thread(target=self._tell, args=(_store(),), name="heartbeat", daemon=True))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(self.beat)

    def leave_if_alone(self, error: Exception) -> None:
        """Exit this process with the message of `error` if the others wait on their devices, which errors of this rank do not reach. Return
        if they raise the same error, or will notice by themselves.

        Ranks that run out of memory do so at different tensors: each then waits for a collective of the other, and they exit too.
        """
        if device_waits() and (self.failed_alone(error) or (self.ranks > 1 and lacks_memory(error))):
            leave_at_once(error, after=2 * self.beat)

    def failed_alone(self, error: Exception) -> bool:
        """Return whether only this rank failed with `error`. The others are then notified and exit if they are inside `watching`.

        If every rank raises an error within `FAILED_TOGETHER_SECONDS`, such as `RunStopped`, the usual exit is safe and this returns False,
        as it does for a single process.
        """
        if self.ranks == 1:
            return False
        first = str(error).strip().partition("\n")[0]
        what = f"rank {self.rank} failed {self.phase} at iteration {self.iteration}: {type(error).__name__}: {first}"
        try:
            store = _store()
            store.set(f"failed/{self.rank}", what)
            end = time.monotonic() + FAILED_TOGETHER_SECONDS
            while not store.check([f"failed/{rank}" for rank in range(self.ranks)]):
                if time.monotonic() > end:
                    self._ended.set()  # stops this rank's own threads: the caller reports its error
                    store.compare_set("verdict", "", what)
                    return True
                time.sleep(0.05)
        except RuntimeError:
            return True  # the store is gone, and so is the process that hosts it
        return False

    def _here(self) -> Whereabouts:
        return Whereabouts(self.iteration, self.phase, time.monotonic() - self._since, time.time(), self._waits())

    def _waits(self) -> bool:
        """Return whether any thread is in a call that waits for other ranks, since backward runs hooks in its own threads."""
        frames = sys._current_frames()
        ours = {thread.ident for thread in threading.enumerate() if thread.name in OUR_THREADS}
        return any(frame.f_code.co_filename.endswith(WAITING_IN) for ident, frame in frames.items() if ident not in ours)

    def _tell(self, store: dist.Store) -> None:
        try:
            while True:
                store.set(str(self.rank), json.dumps(self._here()))
                if self._stalled.is_set() and not store.check(["verdict"]):
                    keys = (str(rank) for rank in range(self.ranks))
                    places = {int(rank): Whereabouts(*json.loads(store.get(rank))) for rank in keys if store.check([rank])}
                    store.compare_set("verdict", "", verdict(places, self.ranks, self.timeout, time.time()))
                if store.check(["verdict"]):
                    self._verdict = store.get("verdict").decode()
                    self._reported.set()
                if self._ended.wait(self.beat):
                    return
        except RuntimeError:
            return  # the store is gone, with the process that hosts it: the watching thread reports it if this rank waits too long

    def _watch(self) -> None:
        still, orphaned, moves = 0.0, 0.0, self._moves
        while not self._reported.is_set():
            if self._ended.wait(self.beat):
                return
            # Counts wake-ups instead of time, because a suspended job has not been waiting.
            still, orphaned, moves = (still + self.beat, orphaned, moves) if self._moves == moves else (0.0, 0.0, self._moves)
            orphaned += self.beat * (self.phase == IN_STEP and self._orphaned())
            if still >= self.timeout or orphaned >= LAUNCHER_GONE_SECONDS:
                self._stalled.set()
                if self.ranks > 1:
                    self._reported.wait(ANSWER_SECONDS)
                break
        here, who = self._here(), f"rank {self.rank}" if self.ranks > 1 else "the process"
        print(
            f"error: {who} ends after {here.seconds:.0f} s at iteration {here.iteration}, {here.phase} "
            f"(--distributed-timeout-minutes {self.timeout / 60:g}): {self._cause()}{_resources(here.phase)}",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        for worker in multiprocessing.active_children():
            worker.kill()  # a stuck reader would outlive this process
        # The others must read it before the exit of this process breaks their connections, and its store.
        time.sleep(2 * self.beat if self.ranks > 1 else 0)
        os._exit(1)

    def _orphaned(self) -> bool:
        """Return whether the torchrun that started this process is gone."""
        return self._launcher is not None and os.getppid() != self._launcher

    def _cause(self) -> str:
        """Return who is stuck, as far as it is known."""
        if self._orphaned():
            return "; ".join(filter(None, ("torchrun, which started this, is gone", self._verdict)))
        if self.ranks == 1:
            return "it is stuck, see the traceback"
        holder = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        return self._verdict or f"the rendezvous store does not respond: {holder}, which hosts it, is dead or stopped"


def _resources(phase: str) -> str:
    """Return, for a process that is stuck reading data, its workers and whether it is short of file descriptors, as the end of a line."""
    workers = sorted(child.pid or 0 for child in multiprocessing.active_children())
    if phase != READING or not workers:
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = f"; at most {limit} files may be open (ulimit -n), and workers pass each batch as files: raise it" if limit < LOW_LIMIT else ""
    return f"; data workers {', '.join(map(str, workers))} send no batch (--num-workers {len(workers)}): see what they wait for{low}"


def _store() -> dist.Store:
    """Return the rendezvous store with a new connection, which waiting calls of other threads do not block."""
    return dist.PrefixStore("msamp/watchdog", dist.distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]


def verdict(places: Mapping[int, Whereabouts], ranks: int, timeout: float, now: float) -> str:
    """Return a text with the stuck rank and the position of each rank.

    Args:
        places: position of each rank that has reported one.
        ranks: number of ranks.
        timeout: seconds for which a rank has waited. A rank that was silent for half of it is dead or stopped (clocks of machines may
            differ by as much). Otherwise the stuck rank is one that reads data, which waits for no other; else the one that is behind; else
            the one that does not wait for the others, because it spins.
        now: seconds since 1970.
    """
    unresponsive = [rank for rank in range(ranks) if rank not in places or now - places[rank].time > timeout / 2]
    reading = [rank for rank, place in places.items() if place.phase == READING]
    first = min((place.iteration for place in places.values()), default=0)
    behind = [rank for rank, place in places.items() if place.iteration == first]
    busy = [rank for rank, place in places.items() if not place.waits]
    stuck = unresponsive or reading or next((some for some in (behind, busy) if len(some) < ranks), [])
    named = f"{_ranks(stuck)} {'is' if len(stuck) == 1 else 'are'} stuck" if stuck else "no rank is behind the others"
    groups: dict[str, list[int]] = {}
    for rank in range(ranks):
        said = _where(places[rank], now if rank in stuck else None) if rank in places else "has never reported its position"
        groups.setdefault(said, []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: group[1][0] not in stuck)
    return "; ".join([named, *(f"{_ranks(members)} {said}" for said, members in ordered)])


def _where(place: Whereabouts, now: float | None) -> str:
    """Return a rank's position; with `now`, for a stuck rank, also for how long, and the time of its last report."""
    said = f"at iteration {place.iteration}, {place.phase}"
    if now is None:
        return said
    waits = "" if place.waits else ", waiting for no rank"
    return f"{said}{waits}, for {place.seconds:.0f} s; last report {max(0.0, now - place.time):.0f} s ago"


def _ranks(numbers: list[int]) -> str:
    """Format ranks as `rank 3`, or `ranks 0-2, 5`."""
    spans = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        span = [number for _, number in group]
        spans.append(f"{span[0]}" if len(span) == 1 else f"{span[0]}-{span[-1]}")
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(spans)}"
