"""Logs of a run besides its checkpoints: JSON lines, TensorBoard events, stdout.

A failed log write must not stop a run. If a disk is full, the failed write is undone, counted and reported once on stderr, and training
continues. Later writes are tried again, so a file continues as soon as there is space. At the end the run reports the number of failed
writes (`Unwritten.describe`). A file that cannot be opened at the start raises an OSError, since nothing is lost yet.

A killed run repeats the iterations since its checkpoint. Their old entries are removed first: by `cut_after` for JSON, and for TensorBoard
by a marker for its readers (`EventFile`'s `purge_step`).
"""

import contextlib
import io
import json
import os
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from megatron.lm.shell.exit_codes import flush_or_close
from megatron.lm.shell.opening import to_write


class Unwritten:
    """A counter of failed writes.

    Attributes:
        counts: failed writes by name of the destination.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def endured(self, where: str) -> Iterator[None]:
        """Count an OSError of the block and warn at the first one, instead of raising it."""
        try:
            yield
        except OSError as error:
            self.counts[where] += 1
            if self.counts[where] == 1:
                _warn(f"{where} cannot be written ({error.strerror or error}): training continues without these entries; free space")

    @contextlib.contextmanager
    def stdout(self) -> Iterator[None]:
        """Handle failures of print inside the block in the same way."""
        stream = sys.stdout
        if stream is None:  # Python's name for a closed one
            yield
            return
        with contextlib.redirect_stdout(_Endured(stream, self)):
            yield
        with self.endured("stdout"):
            flush_or_close(stream)

    def describe(self) -> str | None:
        """Return a text with the failed writes, or None if all succeeded."""
        return ", ".join(f"{count} of {where}" for where, count in self.counts.items()) or None

    def print_failed(self) -> None:
        """Print the failed writes, if any, to stderr."""
        if self.counts:
            _warn(f"failed log writes: {self.describe()}")


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"warning: {text}", file=sys.stderr, flush=True)


class _Endured(io.TextIOBase):
    """A text stream that counts its failures."""

    def __init__(self, stream: TextIO, unwritten: Unwritten) -> None:
        self._stream, self._unwritten = stream, unwritten

    def write(self, text: str) -> int:
        with self._unwritten.endured("stdout"):
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        with self._unwritten.endured("stdout"):
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


class LogFile:
    """An append-only file with unbuffered writes that are complete or undone.

    Args:
        path: of the file; its folder is created. A line that a kill cut off stays, as a separate line.
        where: its name in messages.
        unwritten: counts failed writes.

    Raises:
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path, where: str, unwritten: Unwritten) -> None:
        self.path, self._where, self._unwritten = path, where, unwritten
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = to_write(path, "ab", device=True)
        if _ends_inside_a_line(path):
            self.write(b"\n")

    def write(self, data: bytes) -> None:
        """Append; a failure is only counted."""
        with self._unwritten.endured(self._where):
            size = os.fstat(self._file.fileno()).st_size
            written = 0
            try:
                while written < len(data):
                    written += self._file.write(data[written:]) or 0
            except OSError:
                if written and _is_regular(self.path):
                    self._file.truncate(size)  # a partial line would make the next one unreadable
                raise

    def flush(self) -> None:
        """Do nothing, since writes are unbuffered."""

    def close(self) -> None:
        """Close the file; some file systems only report a failed write here."""
        with self._unwritten.endured(self._where):
            self._file.close()


def _is_regular(path: Path) -> bool:
    return stat.S_ISREG(path.stat().st_mode)


def _ends_inside_a_line(path: Path) -> bool:
    if not _is_regular(path) or not path.stat().st_size:
        return False
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() != b"\n"


def cut_after(path: Path, iteration: int) -> None:
    """Truncate a JSON-lines file after the entries of `iteration` and earlier ones, because the run repeats the rest.

    A file may contain several runs, and after a rollback a run repeats iterations, so the last occurrence counts. If no line has so early
    an iteration, everything since the last start (a line of kind "precision") is removed. Invalid lines, which a kill has cut off, are
    removed with everything after them.
    """
    if not path.exists() or not _is_regular(path):
        return
    reached, started, end = None, None, 0
    with path.open("rb") as stream:
        for line in stream:
            end += len(line)
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("iteration"), int) and row["iteration"] <= iteration:
                    reached = end
                if isinstance(row, dict) and row.get("kind") == "precision":
                    started = end
    keep = reached if reached is not None else started
    if keep is not None and keep < end:
        with to_write(path) as stream:
            stream.truncate(keep)


class EventFile:
    """A TensorBoard event file of scalars, written unbuffered and without a thread.

    torch's SummaryWriter writes from a thread, which dies with a traceback on a full disk, and buffers for two minutes, which a kill loses.

    Args:
        folder: of event files; it is created.
        purge_step: readers ignore entries of older files for this step and later; None ignores nothing.
        unwritten: counts failed writes.

    Raises:
        OSError: if it cannot be opened.
    """

    def __init__(self, folder: Path, purge_step: int | None, unwritten: Unwritten) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session = event_pb2.Event, event_pb2.SessionLog
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = LogFile(folder / name, f"--tensorboard-dir {folder}", unwritten)
        self._writer = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        if purge_step is not None:
            self._add(step=purge_step, session_log=self._session(status=self._session.START))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Add one point of a curve."""
        from torch.utils.tensorboard.summary import scalar

        self._add(step=step, summary=scalar(name, float(value)))

    def _add(self, **what: object) -> None:
        self._writer.write(self._event(wall_time=time.time(), **what).SerializeToString())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
