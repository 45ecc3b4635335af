"""Standard streams that accept every text: closed ones are replaced, and characters that their encoding lacks are written as escapes."""

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

ESCAPES = "msamp.escapes"


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write bytes of a path as they are, and other characters as backslash escapes, as Python does on stderr."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


@contextlib.contextmanager
def printable() -> Iterator[None]:
    """Make `print` safe inside the block.

    Without stdout or stderr (`>&-`), Python sets them to None, and the next file that is opened would get their number, so that libraries
    would print into it. Both are replaced by the null device, and a line on stderr reports it. A stream whose encoding lacks a character,
    such as a path's with `PYTHONIOENCODING=ascii`, would raise a UnicodeEncodeError in the middle of a run.
    """
    codecs.register_error(ESCAPES, _escaped)
    with contextlib.ExitStack() as stack:
        if sys.stderr is None:
            stack.enter_context(contextlib.redirect_stderr(_null(2)))
        if sys.stdout is None:
            stack.enter_context(contextlib.redirect_stdout(_null(1)))
            print("warning: stdout is closed: what this command prints there is lost", file=sys.stderr, flush=True)
        stream = sys.stdout
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            before = stream.errors
            stream.reconfigure(errors=ESCAPES if before == "surrogateescape" else "backslashreplace")
            stack.callback(_restore, stream, before)
        yield


def _restore(stream: io.TextIOWrapper, errors: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # its disk is full, or it was closed
        stream.reconfigure(errors=errors)


def _null(number: int) -> TextIO:
    """Return a stream to the null device under the number of a closed standard stream."""
    opened = os.open(os.devnull, os.O_WRONLY)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    return open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
