"""What a run writes beside its checkpoints: lines of JSON, TensorBoard's events, stdout.

None of it is worth a run. Where a disk is full, the write that fails is taken back, counted, told on stderr at its first time, and
training goes on; later writes are tried again, so that a file goes on as soon as there is space. At the end the run says how many are
lacking (`Unwritten.describe`). What cannot be opened at the start is an OSError there: that costs nothing yet, and somebody can mend it.

A run that is killed repeats the iterations since its checkpoint. What it had told of them goes before it tells them again: `cut_after`
for JSON, and for TensorBoard a mark that its readers obey (`EventFile`'s `purge_step`).
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
    """Counts what could not be written.

    Attributes:
        counts: failed writes by name of where they were to go.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def endured(self, where: str) -> Iterator[None]:
        """An OSError of the block is counted, and told at the first time, instead of raised."""
        try:
            yield
        except OSError as error:
            self.counts[where] += 1
            if self.counts[where] == 1:
                _warn(f"{where} cannot be written ({error.strerror or error}): training goes on without what is lacking there; free space")

    @contextlib.contextmanager
    def stdout(self) -> Iterator[None]:
        """What the block prints is endured like the rest."""
        stream = sys.stdout
        with contextlib.redirect_stdout(_Endured(stream, self)):
            yield
        with self.endured("stdout"):
            flush_or_close(stream)

    def describe(self) -> str | None:
        """What is lacking, as words; None where everything was written."""
        return ", ".join(f"{count} of {where}" for where, count in self.counts.items()) or None

    def tell(self) -> None:
        """Say on stderr what is lacking, if anything is."""
        if self.counts:
            _warn(f"writes that failed and are lacking: {self.describe()}")


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"warning: {text}", file=sys.stderr, flush=True)


class _Endured(io.TextIOBase):
    """A text stream that counts its failures."""

    def __init__(self, stream: TextIO, unwritten: Unwritten) -> None:
        self._stream, self._unwritten = stream, unwritten

    def write(self, text: str) -> int:
        with self._unwritten.endured("stdout"):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._unwritten.endured("stdout"):
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


class LogFile:
    """A file that is appended to, each write at once, whole or not at all.

    Args:
        path: of the file; its folder is made. What a kill has cut off at its end stays, as a line by itself.
        where: what messages call it.
        unwritten: counts what cannot be written.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, where: str, unwritten: Unwritten) -> None:
        self.path, self._where, self._unwritten = path, where, unwritten
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = to_write(path, "ab", device=True)
        if _ends_inside_a_line(path):
            self.write(b"\n")

    def write(self, data: bytes) -> None:
        """Append; what fails is endured."""
        with self._unwritten.endured(self._where):
            size = os.fstat(self._file.fileno()).st_size
            written = 0
            try:
                while written < len(data):
                    written += self._file.write(data[written:]) or 0
            except OSError:
                if written and _is_regular(self.path):
                    self._file.truncate(size)  # a torn line and what follows it cannot be read
                raise

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Close the file; some file systems tell only now that a write failed."""
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
    """Cut a file of JSON lines behind what was told of `iteration` and those before it: the rest is about to come again.

    A file may hold several runs, and after a rollback a run goes through iterations twice: what comes last counts. Where no line is about
    so early an iteration, everything since the last start (a line of kind "precision") goes. Lines that are no JSON object, which a kill
    has cut off, go with what follows them.
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
    """TensorBoard's events of scalars, in a file of their own in a folder; no thread, and nothing is kept back.

    torch's SummaryWriter writes from a thread that a full disk ends with a traceback, and keeps what a kill then loses for two minutes.

    Args:
        folder: of event files; it is made.
        purge_step: readers leave out what older files of the folder say of this step and later ones; None: nothing.
        unwritten: counts what cannot be written.

    Raises:
        OSError: it cannot be opened.
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
        """One point of a curve."""
        from torch.utils.tensorboard.summary import scalar

        self._add(step=step, summary=scalar(name, float(value)))

    def _add(self, **what: object) -> None:
        self._writer.write(self._event(wall_time=time.time(), **what).SerializeToString())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
