"""The trainer's error besides ValueError, and how a process reports its error."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path


class RunStopped(RuntimeError):
    """A run cannot continue; the message has the reason and the fix."""


def report(line: str, message: str) -> None:
    """Print `line` to stderr. Under torchrun, only the first process of a machine prints; the others write `message` to the file from which
    torchrun prints the error that came first."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):  # the disk of stderr may be full
            print(line, file=sys.stderr, flush=True)
    if file:
        content = {"message": {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps(content), encoding="utf-8")


def missing(package: str) -> str:
    """Return the error message for an interpreter without `package`."""
    return (
        f"{sys.executable} has no {package}: activate the environment with it (`source .venv/bin/activate` after `make venv`), or install "
        "msamp there (`pip install -e .`)"
    )
