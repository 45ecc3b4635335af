"""Requests to a process from outside: signals, the time limit, and the end of the launcher that would restart it."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

from megatron.lm.shell.exit_codes import SAVE_SIGNALS


class Requests:
    """SIGTERM, the time limit of `minutes`, and the end of torchrun request the process to leave; `SAVE_SIGNALS` request a checkpoint.

    A killed torchrun does not stop its processes, which would still run when the job is restarted. Leaving for that reason is a failure:
    with several torchruns and restarts, the others then wait for the lost one to come back, and restart their processes.

    SIGINT ends the block with KeyboardInterrupt as usual.
    """

    def __init__(self, minutes: float | None) -> None:
        self.minutes = minutes
        self._started = time.monotonic()
        self._asked: set[int] = set()
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle these signals during the block, so that they never end the process, for example in a save; SIGINT does. A request to save
        that is ignored, as SIGHUP under nohup, stays ignored."""
        saving = [number for number in SAVE_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, *saving)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked.add(number)
        if number == signal.SIGXCPU:
            signal.signal(number, signal.SIG_IGN)  # the kernel repeats it every second

    def take(self) -> list[bool]:
        """Return whether SIGTERM came, one of `SAVE_SIGNALS` came since the last call, the time is over, and the launcher is gone."""
        save = not self._asked.isdisjoint(SAVE_SIGNALS)
        self._asked.difference_update(SAVE_SIGNALS)
        over = self.minutes is not None and time.monotonic() - self._started >= 60 * self.minutes
        orphaned = self._launcher is not None and os.getppid() != self._launcher
        return [signal.SIGTERM in self._asked, save, over, orphaned]
