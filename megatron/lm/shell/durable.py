"""Durable writes: a file gets its name only when its content is on disk, so a kill at any moment leaves no partial file."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream to a new file next to `path` that is renamed to `path` when it is on disk; if the block fails, it is deleted.

    Several processes and threads may write the same path: each has its own temporary file, and the last to finish wins.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush(path.parent)


def flush(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
