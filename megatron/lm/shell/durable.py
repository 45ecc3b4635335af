"""Durable writes: a file gets its name only when its content is on disk, so a kill at any moment leaves no partial file."""

import contextlib
import errno
import fcntl
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron.lm.shell.opening import new_file, to_write

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # errors of file systems without locks, such as Lustre mounted without them


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream to a temporary file that is renamed to `path` when it is on disk; if the block fails, it is deleted.

    Several processes and threads may write the same path: each has its own temporary file, and the last to finish wins. Temporary files of
    killed processes are deleted: the file system has released their locks, unlike the locks of processes that still write.
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
    """Create a temporary file, locked if the file system has locks; without locks, files of killed processes stay."""
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
        stream.close()  # before it was locked, another writer mistook it for the file of a killed process


def _clear(path: Path) -> None:
    """Delete the temporary files of killed writes to `path`."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.partial"):
        with contextlib.suppress(OSError, ValueError), to_write(left) as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def flush(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
