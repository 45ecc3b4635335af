"""What a process is asked to do from outside: by signals, and by the clock."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType


class Requests:
    """Signals and the clock: SIGTERM and `minutes` since this object was made ask to leave, SIGUSR1 asks for a checkpoint."""

    def __init__(self, minutes: float | None) -> None:
        self.minutes = minutes
        self._started = time.monotonic()
        self._asked: set[int] = set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the two signals while the block runs: none ends the process, whatever it is doing, a save included."""
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked.add(number)

    def take(self) -> list[bool]:
        """Whether SIGTERM came, SIGUSR1 came since the last call, and the time is over."""
        save = signal.SIGUSR1 in self._asked
        self._asked.discard(signal.SIGUSR1)
        over = self.minutes is not None and time.monotonic() - self._started >= 60 * self.minutes
        return [signal.SIGTERM in self._asked, save, over]
