"""What is on the disk survives a kill at any moment: a file has its name only once all of it, and its name, are written through."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """A stream to `path.partial`, which takes the name `path` once it is on the disk; where the block fails, nothing of it stays."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            yield stream
        flush(partial)
        partial.replace(path)
        flush(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
