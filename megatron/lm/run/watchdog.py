"""End a process that is stuck, with its position and traceback, because a stopped or spinning rank never joins a collective."""

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from megatron.lm.processes.process_groups import device_waits
from megatron.lm.shell.exit_codes import lacks_memory, leave_at_once

BEAT_SECONDS = 5.0  # at most, between two looks at this process
FAILED_TOGETHER_SECONDS = 3.0  # how much later than this rank another may raise an error that all ranks raise
LAUNCHER_GONE_SECONDS = 120.0  # how long a step may still take once torchrun is dead
READING, IN_STEP = "reading data", "in a step"


class Watchdog:
    """A thread during `watching`, which exits the process with code 1 if it has not advanced for `timeout` seconds.

    The line on stderr has the rank's iteration and phase, and the traceback shows whether it waits for the others in a collective or is
    itself stuck. Unwinding would hang.

    Processes leave after the step in which their torchrun was killed (`signals.Requests`). A step that never ends, because its collectives
    do not, would hold the GPU for the whole timeout: it ends after `LAUNCHER_GONE_SECONDS`.

    Args:
        timeout: seconds; a step, a checkpoint and a batch of an evaluation must take less.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.beat = min(BEAT_SECONDS, timeout / 8)
        self.iteration, self.phase = 0, "starting"
        self._moves, self._since = 0, time.monotonic()
        self._ended = threading.Event()
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def at(self, phase: str, iteration: int | None = None) -> None:
        """Report that this rank is in `phase` of an iteration (None: the same as before)."""
        self.phase, self.iteration = phase, self.iteration if iteration is None else iteration
        self._moves, self._since = self._moves + 1, time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        self._ended.clear()
        self.at("starting")
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(self.beat)

    def _watch(self) -> None:
        still, orphaned, moves = 0.0, 0.0, self._moves
        while still < self.timeout and orphaned < LAUNCHER_GONE_SECONDS:
            if self._ended.wait(self.beat):
                return
            # Counts wake-ups instead of time, because a suspended job has not been waiting.
            still, orphaned, moves = (still + self.beat, orphaned, moves) if self._moves == moves else (0.0, 0.0, self._moves)
            orphaned += self.beat * (self.phase == IN_STEP and self._is_orphan())
        who = f"rank {dist.get_rank()}" if dist.is_initialized() and dist.get_world_size() > 1 else "the process"
        cause = "torchrun, which started this, is gone" if self._is_orphan() else "it is stuck, or waits for a rank that is"
        print(
            f"error: {who} ends after {time.monotonic() - self._since:.0f} s at iteration {self.iteration}, {self.phase} "
            f"(--distributed-timeout-minutes {self.timeout / 60:g}): {cause}",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        for worker in multiprocessing.active_children():
            worker.kill()  # a stuck reader would outlive this process
        time.sleep(2 * self.beat)  # the others report their own positions before this exit breaks their connections
        os._exit(1)

    def _is_orphan(self) -> bool:
        """Return whether the torchrun that started this process is gone."""
        return self._launcher is not None and os.getppid() != self._launcher


def leave_if_alone(error: Exception) -> None:
    """Exit this process with the message of `error` if the other ranks wait on their devices (NCCL), which it does not reach: even
    destroying the process groups would wait for them. Return if they raise the same error.

    Ranks that run out of memory do so at different tensors: each then waits for a collective of the other, and they exit too.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1 and device_waits() and (lacks_memory(error) or not _failed_together(ranks)):
        leave_at_once(error)


def _failed_together(ranks: int) -> bool:
    """Return whether every rank calls this within `FAILED_TOGETHER_SECONDS`, as after `RunStopped`."""
    try:
        # A new connection, which waiting calls of other threads do not block.
        store = dist.PrefixStore("msamp/failed", dist.distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]
        store.set(str(dist.get_rank()), "")
        end = time.monotonic() + FAILED_TOGETHER_SECONDS
        while not store.check([str(rank) for rank in range(ranks)]):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
    except RuntimeError:
        return False  # the store is gone, and so is the process that hosts it
    return True
