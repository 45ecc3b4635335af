"""The errors of the trainer that are no ValueError, and how the processes of a job report one error once."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# The processes of a job find the error that they all have within this time of each other: they import the same packages from one disk.
FIRST_RANK_SECONDS = 10.0


class RunStopped(RuntimeError):
    """A run that cannot go on; says why, and what to do."""


def report(line: str, message: str) -> None:
    """Print `line` to stderr, unless the first process of this machine prints the same error.

    Under torchrun each process leaves its error in the file in which torchrun looks for it (as torch's `record` does). The first one prints
    at once. The others wait until it has left one: the same error is not printed again, another one is. They stop to wait after
    `FIRST_RANK_SECONDS`, and when torchrun ends them.

    Args:
        message: what is wrong, without what differs between processes; numbers do not count where two are compared.
    """
    if not _first_rank_reports(message):
        with contextlib.suppress(OSError):  # stderr may be what is full
            print(line, file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):  # it is printed all the same
            Path(file).write_text(json.dumps(content), encoding="utf-8")


def missing(package: str) -> str:
    """What to do where the interpreter lacks `package`."""
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
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not there yet, or not whole
                return _plain(json.loads(first.read_text(encoding="utf-8"))["message"]["message"]) == _plain(message)
            if last:
                return False
            time.sleep(0.05)


def _plain(message: str) -> str:
    return re.sub(r"\d+", "", message)


@contextlib.contextmanager
def _terminated() -> Iterator[list[int]]:
    """A list that is no longer empty once SIGTERM has come; where another thread reports, SIGTERM ends the process as before."""
    ended: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    except ValueError:  # only the main thread may
        yield ended
        return
    try:
        yield ended
    finally:
        signal.signal(signal.SIGTERM, before)
