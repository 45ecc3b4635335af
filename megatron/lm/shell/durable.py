"""What is on the disk survives a kill at any moment: a file has its name only once all of it, and its name, are written through."""

import contextlib
import errno
import fcntl
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron.lm.shell.opening import new_file, to_write

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # of a file system that has none, such as Lustre mounted without them


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """A stream to a temporary file, which takes the name `path` once it is on the disk; where the block fails, nothing of it stays.

    Processes and threads may write one path at once: each has a file of its own, and the last one to end gives `path` its content. What a
    killed process has left of a write to `path` is deleted; its lock, which the file system frees, tells it from the file of one that
    still writes.
    """
    _clear(path)
    partial, stream = _locked(path)
    with stream:
        try:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        flush(path.parent)


def _locked(path: Path) -> tuple[Path, BinaryIO]:
    """A new temporary file, locked where the file system has locks; where it has none, what a kill leaves stays."""
    while True:
        partial, stream = new_file(path)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                stream.close()
                partial.unlink(missing_ok=True)
                raise
        if partial.exists():
            return partial, stream
        stream.close()  # before it was locked, another writer took it for what a kill had left


def _clear(path: Path) -> None:
    """Delete the temporary files of killed writes to `path`."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.partial"):
        with contextlib.suppress(OSError, ValueError), to_write(left) as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
