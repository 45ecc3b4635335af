"""Progress of a long command, as a line on stderr every few seconds; a command of a second prints none."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TextIO, TypeVar

from megatron.lm.shell.streams import unfiltered

T = TypeVar("T")
FIRST_SECONDS, SECONDS = 1.0, 5.0


class Progress:
    """Print the current task of a command, its progress and the elapsed time while the block runs.

    On a terminal one line is rewritten; in a file each line stays.

    Args:
        what: the work, such as `to-hf checkpoints`.
        stream: to print to; stderr by default.
        first, seconds: time of the first line, and interval of the others.

    Attributes:
        what, done, total, unit: set by `begin` and `counted`; total is None if it is unknown.
    """

    def __init__(self, what: str, stream: TextIO | None = None, first: float = FIRST_SECONDS, seconds: float = SECONDS) -> None:
        self.what, self.done, self.unit = what, 0, ""
        self.total: int | None = None
        self._stream, self._first, self._seconds = stream, first, seconds
        self._ended = threading.Event()

    def __enter__(self) -> Progress:
        self._start = self._part_start = time.monotonic()
        self._ended.clear()
        self._thread = threading.Thread(target=self._keep_printing, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def begin(self, what: str, total: int | None = None, unit: str = "") -> None:
        """Start another task, of `total` of `unit`, none of them done."""
        self.what, self.done, self.total, self.unit = what, 0, total, unit
        self._part_start = time.monotonic()

    def counted(self, items: Iterable[T], total: int | None, unit: str) -> Iterator[T]:
        """Yield `items`, `total` in all, and count them."""
        self.begin(self.what, total, unit)
        for item in items:
            yield item
            self.done += 1

    def line(self) -> str:
        """Return the progress line."""
        now = time.monotonic()
        words = [f"{now - self._start:.0f} s"]
        if self.unit:
            share = f" of {self.total:,} {self.unit} ({100 * self.done / max(self.total, 1):.0f} %)" if self.total else f" {self.unit}"
            words.insert(0, f"{self.done:,}{share}")
        if self.total and self.done:
            words.append(f"{(self.total - self.done) * (now - self._part_start) / self.done:.0f} s left")
        return f"{self.what}: {', '.join(words)}"

    def _keep_printing(self) -> None:
        stream, wait, printed = unfiltered(self._stream or sys.stderr), self._first, False
        terminal = stream.isatty()
        while not self._ended.wait(wait):
            print(f"\r\x1b[2K{self.line()}" if terminal else self.line(), end="" if terminal else "\n", file=stream, flush=True)
            wait, printed = self._seconds, True
        if printed and terminal:
            print("\r\x1b[2K", end="", file=stream, flush=True)
