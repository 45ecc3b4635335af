"""Progress lines of preprocessing, on standard error."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO


class Progress:
    """Print documents/s, MB/s and the remaining time to standard error, at most once per `interval` documents.

    As a context manager it also prints after one second, and after every `seconds` without a line: one document may take minutes.
    """

    def __init__(self, total_bytes: int, interval: int, stream: TextIO | None = None, seconds: float = 5.0) -> None:
        self.documents = 0
        self._bytes, self._begun_bytes, self._total_bytes = 0, 0, total_bytes
        self._interval, self._next = interval, interval
        self._start = self._printed = time.monotonic()
        self._stream = stream
        self._seconds, self._left = seconds, threading.Event()

    def __enter__(self) -> Progress:
        self._left.clear()
        self._printed = time.monotonic() - max(0.0, self._seconds - 1.0)  # the first line is due after one second
        self._thread = threading.Thread(target=self._keep_telling, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def begin(self, source_bytes: int) -> None:
        """Count a document whose tokenization starts."""
        self._begun_bytes += source_bytes

    def skip(self, source_bytes: int) -> None:
        """Exclude the work of an earlier run from the rates."""
        self._total_bytes -= source_bytes

    def advance(self, documents: int, source_bytes: int) -> None:
        """Count written documents, and print once per interval."""
        self.documents += documents
        self._bytes += source_bytes
        if self.documents >= self._next:
            self._next = self.documents + self._interval
            self._print()

    def line(self) -> str:
        """Return the progress as one line."""
        seconds = max(time.monotonic() - self._start, 1e-6)
        left = (self._total_bytes - self._bytes) * seconds / max(self._bytes, 1)
        share = 100 * self._bytes / max(self._total_bytes, 1)
        rates = f"{self.documents / seconds:.0f} documents/s, {self._bytes / seconds / 1e6:.2f} MB/s"
        begun = self._begun_bytes - self._bytes
        at_work = f", {begun / 1e6:.1f} MB at work" if begun > 0 else ""
        time_left = f"{max(left, 0):.0f} s left" if self._bytes else f"after {seconds:.0f} s"
        return f"{self.documents} documents ({share:.0f} %), {rates}{at_work}, {time_left}"

    def _print(self) -> None:
        self._printed = time.monotonic()
        print(self.line(), file=self._stream or sys.stderr, flush=True)

    def _keep_telling(self) -> None:
        while not self._left.wait(max(0.0, self._printed + self._seconds - time.monotonic())):
            if time.monotonic() - self._printed >= self._seconds:
                self._print()
