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

    Processes and threads that write one path at once do so one after the other, and the last one's file stays: one that waits says so.
    The lock that orders them is gone with a process that is killed, unless a child that it forked inside the block lives on, and the next
    writer overwrites what that one left. A block inside another of the same path waits for ever. On a file system without locks writers are
    not ordered: the file can be a mixture, or one of them fail with FileNotFoundError.
    """
    partial = path.with_name(path.name + ".partial")
    with _opened(partial) as stream:
        try:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        flush(path.parent)  # the name `partial` may be another writer's by now


def _opened(partial: Path) -> BinaryIO:
    """The empty file, locked. A writer that waited holds the file of the one before it, which has its own name by then: it opens anew."""
    while True:
        stream = os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT, 0o666), "wb")
        try:
            _lock(stream, partial)
            # Opened anew, not asked by its name alone: NFS may remember the name of the file before.
            with contextlib.suppress(FileNotFoundError), partial.open("rb") as found:
                if os.path.samestat(os.fstat(found.fileno()), os.fstat(stream.fileno())):
                    stream.truncate(0)
                    return stream
        except BaseException:
            stream.close()
            raise
        stream.close()


def _lock(stream: BinaryIO, partial: Path) -> None:
    try:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{partial} is being written by another process: waiting for it", flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
