"""Standard streams of a command: control characters in what it prints are shown as escapes.

Names of files, layers and recipes, generated text and error messages come from files that somebody else may have written. Escape sequences
in them could clear the screen or set the title of the terminal. So `printable` filters everything that a command prints; what colors a line
or rewrites it (`terminal.py`, `progress.py`) writes to `unfiltered`.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

# C0 without tab and line feed, delete, C1, and the marks that reorder text.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
_ESCAPES |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def escaped(text: str) -> str:
    """Return `text` with control characters other than tab and line feed as escapes."""
    return text.translate(_ESCAPES)


class _Printable:
    """A text stream that escapes control characters, and is otherwise the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        self.unfiltered.write(escaped(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def unfiltered(stream: TextIO) -> TextIO:
    """Return the stream below `printable`'s filter."""
    return getattr(stream, "unfiltered", stream)


@contextlib.contextmanager
def printable() -> Iterator[None]:
    """Filter stdout and stderr inside the block; characters that their encoding lacks are written as escapes too."""
    with contextlib.ExitStack() as stack:
        for redirect, stream in ((contextlib.redirect_stdout, sys.stdout), (contextlib.redirect_stderr, sys.stderr)):
            if isinstance(stream, _Printable) or stream is None:  # None: closed
                continue
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
            stack.enter_context(redirect(cast("TextIO", _Printable(stream))))
        yield
