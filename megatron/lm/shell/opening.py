"""Open files in untrusted folders: writes do not follow links out of the folder, and reads do not wait on pipes.

A checkpoint or a dataset from elsewhere may contain a link where a run writes: opening it by name would overwrite its target. So a run
writes only to regular files (`to_write`), or to new files that it renames (`durable.py`).
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

_MODES = {"r+b": os.O_RDWR, "ab": os.O_WRONLY | os.O_APPEND, "wb": os.O_WRONLY}


def to_write(path: Path, mode: str = "r+b") -> BinaryIO:
    """Open a file for writing; a missing one is created.

    Args:
        path: of the file.
        mode: "r+b" keeps the content and starts at its beginning, "ab" appends, both unbuffered; "wb" truncates the file.

    Raises:
        ValueError: if it is a link or not a regular file. Nothing was changed.
        OSError: if it cannot be opened.
    """
    try:
        descriptor = os.open(path, _MODES[mode] | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ValueError(_refused(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(_refused(path))
    if mode == "wb":
        os.ftruncate(descriptor, 0)
    return cast("BinaryIO", os.fdopen(descriptor, mode, buffering=-1 if mode == "wb" else 0))


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a regular file, following links.

    Raises:
        ValueError: if it is a pipe, a device or a folder, or not UTF-8 (UnicodeDecodeError).
        OSError: if it is missing or cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file: put the file itself there")
    return path.read_text(encoding="utf-8")


def own_folder(path: Path) -> None:
    """Create a folder for files of a run, with its parents, if it does not exist; raise a ValueError if it is a link."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and files would be written to its target: delete the link, or choose another path")
    path.mkdir(parents=True, exist_ok=True)


def _refused(path: Path) -> str:
    what = f"a link to {os.readlink(path)}" if path.is_symlink() else "not a file"
    return f"{path} is {what}, but it must be a regular file: delete it, or choose another path"
