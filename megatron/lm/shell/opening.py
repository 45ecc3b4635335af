"""Open files in untrusted folders: writes do not follow links out of the folder, and reads do not block on pipes.

An untrusted folder, such as a checkpoint or a dataset, may contain a link where a run writes, so that opening it by name would overwrite
the target of the link. So a run only writes to regular files that are neither symbolic nor hard links (`to_write`), and to temporary files
that it creates under random names (`new_file`). A read follows links but only opens regular files (`read_bytes`): opening a named pipe
would wait for a writer.
"""

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO, cast

_NEVER_WAITS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def to_write(path: Path, mode: str = "r+b", *, device: bool = False) -> BinaryIO:
    """Open a file for writing; a missing one is created.

    Args:
        path: of the file.
        mode: "r+b" keeps the content and starts at its beginning, "ab" appends, both unbuffered; "wb" truncates the file.
        device: whether to accept a character device too, such as /dev/null or a terminal, also through a link.

    Raises:
        ValueError: if it is a link, a pipe or a folder, or a file with hard links. Nothing was changed.
        OSError: if it cannot be opened.
    """
    links = 0
    if device and path.exists() and stat.S_ISCHR(path.stat().st_mode):
        links = os.O_NOFOLLOW
    flags = {"r+b": os.O_RDWR, "ab": os.O_WRONLY | os.O_APPEND, "wb": os.O_WRONLY}[mode] | os.O_CREAT | _NEVER_WAITS & ~links
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ValueError(_refused(path)) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not (links and stat.S_ISCHR(status.st_mode)) and not (stat.S_ISREG(status.st_mode) and status.st_nlink <= 1):
            raise ValueError(_refused(path))
        if mode == "wb":
            os.ftruncate(descriptor, 0)
        return cast("BinaryIO", os.fdopen(descriptor, mode, buffering=-1 if mode == "wb" else 0))
    except BaseException:
        os.close(descriptor)
        raise


def new_file(path: Path) -> tuple[Path, BinaryIO]:
    """Create a temporary file next to `path`, `NAME.RANDOM.partial`; return its path and a stream to it."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    return partial, os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NEVER_WAITS, 0o666), "w+b")


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file, following links.

    Raises:
        ValueError: if it is a pipe, a device or a folder.
        OSError: if it is missing or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise ValueError(f"{path} is {_KINDS.get(kind, 'no file')}: put the file itself there")
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read()


def read_text(path: Path) -> str:
    """Like `read_bytes`, decoded; raise UnicodeDecodeError, a ValueError, if it is not UTF-8."""
    return read_bytes(path).decode("utf-8")


def own_folder(path: Path) -> None:
    """Create a folder for files of a run, with its parents, if it does not exist; raise a ValueError if it is a link."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and files would be written to its target: delete the link, or choose another path")
    path.mkdir(parents=True, exist_ok=True)


def _refused(path: Path) -> str:
    status = path.lstat()
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFREG:
        names = f"{status.st_nlink} names (hard links)"
        return f"{path} is a file with {names}, and writing would change all of them: delete it, or put a copy there"
    what = _KINDS.get(kind, "no file")
    leads = f" to {os.readlink(path)}" if kind == stat.S_IFLNK else ""
    return f"{path} is {what}{leads}, but it must be a regular file: delete it, or choose another path"
