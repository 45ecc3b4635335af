"""What a process is asked to do from outside: by signals, by the clock, and by the end of the launcher that would restart it."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType


class Requests:
    """SIGTERM, `minutes` since this object was made, and the end of torchrun ask to leave; SIGUSR1 asks for a checkpoint.

    A torchrun that was killed tells its processes nothing, and what starts the job again would find them at work. To leave for that is a
    failure: of several torchruns with restarts the others then wait for the one that comes back, and start their processes again.

    SIGINT ends the block by KeyboardInterrupt, as without it. Where Python swallows that, as in a `__del__` or a callback of the import
    system, it comes again at the next `take`.
    """

    def __init__(self, minutes: float | None) -> None:
        self.minutes = minutes
        self._started = time.monotonic()
        self._asked: set[int] = set()
        self._interrupted = False
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the two signals while the block runs: none ends the process, whatever it is doing, a save included. SIGINT does."""
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGUSR1)}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a host's own handler stays, and so does an ignored one
            before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked.add(number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def take(self) -> list[bool]:
        """Whether SIGTERM came, SIGUSR1 came since the last call, the time is over, and the launcher is gone."""
        if self._interrupted:
            raise KeyboardInterrupt
        save = signal.SIGUSR1 in self._asked
        self._asked.discard(signal.SIGUSR1)
        over = self.minutes is not None and time.monotonic() - self._started >= 60 * self.minutes
        orphaned = self._launcher is not None and os.getppid() != self._launcher
        return [signal.SIGTERM in self._asked, save, over, orphaned]
