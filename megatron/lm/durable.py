"""What is on the disk survives a kill at any moment: a file has its name only once all of it, and its name, are written through."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # of a file system that has none, such as Lustre mounted without them


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """A stream to `path.partial`, which takes the name `path` once it is on the disk; where the block fails, nothing of it stays.

    Processes and threads that write one path at once do so one after the other, and the last one's file stays. The lock that orders them is
    gone with a process that is killed, and the next writer overwrites what that one left. On a file system without locks they are not
    ordered: the file can be a mixture, or a writer fail with FileNotFoundError.
    """
    partial = path.with_name(path.name + ".partial")
    with _opened(partial) as stream:
        try:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            partial.replace(path)
            flush(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _opened(partial: Path) -> BinaryIO:
    """The empty file, locked. A writer that waited holds the file of the one before it, which has its own name by then: it opens anew."""
    while True:
        stream = os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT, 0o666), "wb")
        try:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(partial.stat(), os.fstat(stream.fileno())):
                    stream.truncate(0)
                    return stream
        except BaseException:
            stream.close()
            raise
        stream.close()


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
