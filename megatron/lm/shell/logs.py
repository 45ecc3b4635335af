"""Logs of a run besides its checkpoints: JSON lines and TensorBoard events.

A failed log write must not stop a run. If a disk is full, the failed write is undone, counted and reported once on stderr, and training
continues. At the end the run reports the number of failed writes (`Unwritten.describe`). A file that cannot be opened at the start raises
an OSError, since nothing is lost yet.

A killed run repeats the iterations since its checkpoint. Their old entries are removed first: by `cut_after` for JSON, and for TensorBoard
by a marker for its readers (`EventFile`'s `purge_step`).
"""

import contextlib
import errno
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron.lm.shell.files import to_write


class Unwritten:
    """A counter of failed writes, by name of their destination (`counts`)."""

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
        self._where, self._unwritten = where, unwritten
        path.parent.mkdir(parents=True, exist_ok=True)
        device = path.exists() and not path.is_file()  # such as /dev/null
        self._file = path.open("ab", buffering=0) if device else to_write(path, "ab")
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as stream:
                stream.seek(-1, os.SEEK_END)
                if stream.read() != b"\n":
                    self.write(b"\n")

    def write(self, data: bytes) -> None:
        """Append; a failure is only counted."""
        with self._unwritten.endured(self._where):
            written = self._file.write(data)
            if written < len(data):  # the disk is full: a partial line would make the next one unreadable
                self._file.truncate(self._file.tell() - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file; some file systems only report a failed write here."""
        with self._unwritten.endured(self._where):
            self._file.close()


def cut_after(path: Path, iteration: int) -> None:
    """Truncate a JSON-lines file after the entries of `iteration` and earlier ones, because the run repeats the rest.

    A file may contain several runs, and after a rollback a run repeats iterations, so the last occurrence counts. If no line has so early
    an iteration, everything since the last start (a line of kind "precision") is removed. Invalid lines, which a kill has cut off, are
    removed with everything after them.
    """
    if not path.is_file():
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
    """A TensorBoard event file of scalars.

    Args:
        folder: of event files; it is created.
        purge_step: readers ignore entries of older files for this step and later; None ignores nothing.
        unwritten: counts failed writes.
    """

    def __init__(self, folder: Path, purge_step: int | None, unwritten: Unwritten) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)
        self._where, self._unwritten = f"--tensorboard-dir {folder}", unwritten

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Add one point of a curve."""
        with self._unwritten.endured(self._where):
            self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Write what is buffered and close the file."""
        with self._unwritten.endured(self._where):
            self._writer.close()
