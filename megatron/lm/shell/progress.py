"""Progress of a long command, as a line on stderr every few seconds; a command of a second prints none."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
FIRST_SECONDS, SECONDS = 1.0, 5.0


class Progress:
    """Print the current task of a command, its progress and the elapsed time while the block runs.

    Args:
        what: the work, such as `to-hf checkpoints`.
        first, seconds: time of the first line, and interval of the others.

    Attributes:
        what, done, total, unit: set by `begin` and `counted`; total is None if it is unknown.
    """

    def __init__(self, what: str, first: float = FIRST_SECONDS, seconds: float = SECONDS) -> None:
        self._first, self._seconds = first, seconds
        self._ended = threading.Event()
        self.begin(what)

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._keep_printing, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def begin(self, what: str, total: int | None = None, unit: str = "") -> None:
        """Start another task, of `total` of `unit`, none of them done."""
        self.what, self.done, self.total, self.unit = what, 0, total, unit

    def counted(self, items: Iterable[T], total: int | None, unit: str) -> Iterator[T]:
        """Yield `items`, `total` in all, and count them."""
        self.begin(self.what, total, unit)
        for item in items:
            yield item
            self.done += 1

    def _keep_printing(self) -> None:
        wait = self._first
        while not self._ended.wait(wait):
            share = f" of {self.total:,} {self.unit} ({100 * self.done / max(self.total, 1):.0f} %)" if self.total else f" {self.unit}"
            done = f"{self.done:,}{share}, " if self.unit else ""
            print(f"{self.what}: {done}{time.monotonic() - self._start:.0f} s", file=sys.stderr, flush=True)
            wait = self._seconds
