"""The trainer's error besides ValueError, and reporting of an error that all processes of a job have only once."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# An error that all processes of a job have appears within this time on all of them: they import the same packages from one disk.
FIRST_RANK_SECONDS = 10.0


class RunStopped(RuntimeError):
    """A run cannot continue; the message has the reason and the fix."""


def report(line: str, message: str) -> None:
    """Print `line` to stderr, unless the first process of this machine prints the same error.

    Under torchrun each process writes its error to the file that torchrun reads (as torch's `record` does). The first process prints at
    once. The others wait for its file and print their error only if it is different. They stop waiting after `FIRST_RANK_SECONDS`, and
    when torchrun terminates them.

    Args:
        message: the error without details that differ between processes; numbers are ignored when two messages are compared.
    """
    if not _first_rank_reports(message):
        with contextlib.suppress(OSError):  # the disk of stderr may be full
            print(line, file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):  # it was printed anyway
            Path(file).write_text(json.dumps(content), encoding="utf-8")


def missing(package: str) -> str:
    """Return the error message for an interpreter without `package`."""
    return (
        f"{sys.executable} has no {package}: activate the environment with it (`source .venv/bin/activate` after `make venv`), or install "
        "msamp there (`pip install -e .`)"
    )


def _first_rank_reports(message: str) -> bool:
    file, rank = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get("LOCAL_RANK", "0")
    if not file or rank == "0":
        return False
    first = Path(file).parents[1] / "0" / Path(file).name  # torchrun: attempt/LOCAL_RANK/error.json
    deadline = time.monotonic() + FIRST_RANK_SECONDS
    with _terminated() as ended:
        while True:
            last = bool(ended) or time.monotonic() > deadline
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # missing or incomplete so far
                return _plain(json.loads(first.read_text(encoding="utf-8"))["message"]["message"]) == _plain(message)
            if last:
                return False
            time.sleep(0.05)


def _plain(message: str) -> str:
    return re.sub(r"\d+", "", message)


@contextlib.contextmanager
def _terminated() -> Iterator[list[int]]:
    """Yield a list that is non-empty after SIGTERM. Outside the main thread SIGTERM ends the process as before."""
    ended: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    except ValueError:  # only the main thread may set handlers
        yield ended
        return
    try:
        yield ended
    finally:
        signal.signal(signal.SIGTERM, before)
