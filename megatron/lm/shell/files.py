"""Files that are complete or absent, and files in folders of unknown origin: no write through a link, no wait on a pipe.

A checkpoint or a dataset from elsewhere may contain a link where a run writes: opening it by name would overwrite its target. So a run
writes only to regular files (`to_write`), or to new files that it renames (`written_aside`, `new_folder`).
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

_MODES = {"r+b": os.O_RDWR, "ab": os.O_WRONLY | os.O_APPEND, "wb": os.O_WRONLY}
_LOCK = ".lock"


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a regular file, following links.

    Raises:
        ValueError: if it is a pipe, a device or a folder, or not UTF-8 (UnicodeDecodeError).
        OSError: if it is missing or cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file: put the file itself there")
    return path.read_text(encoding="utf-8")


def read_input(file: Path, what: str) -> str:
    """Return the text of an input file, without a byte order mark; raise a ValueError with its name if it is missing or not text. `what`
    describes the expected file."""
    try:
        return read_text(file).removeprefix("\ufeff")
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): give {what}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): give {what}") from None


def json_lines(file: Path, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where it is and the object of each line of an input file that is not blank; ValueError for another line. `what` as above."""
    for number, line in enumerate(read_input(file, what).splitlines(), 1):
        if not line.strip():
            continue
        where = f"line {number} of {file}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is invalid JSON ({error}): each line must be one object") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where} is not a JSON object: give {what}")
        yield where, row


def to_write(path: Path, mode: str = "r+b") -> BinaryIO:
    """Open a file for writing; a missing one is created.

    Args:
        path: of the file.
        mode: "r+b" keeps the content and starts at its beginning, "ab" appends, both unbuffered; "wb" truncates the file.

    Raises:
        ValueError: if it is a link or not a regular file. Nothing was changed.
        OSError: if it cannot be opened.
    """
    refused = f"{path} is a link or not a file, but it must be a regular file: delete it, or choose another path"
    try:
        descriptor = os.open(path, _MODES[mode] | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ValueError(refused) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(refused)
    if mode == "wb":
        os.ftruncate(descriptor, 0)
    return cast("BinaryIO", os.fdopen(descriptor, mode, buffering=-1 if mode == "wb" else 0))


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream to a new file next to `path` that is renamed to `path` when it is on disk; if the block fails, it is deleted.

    Several processes and threads may write the same path: each has its own temporary file, and the last to finish wins. A writer holds a
    lock on its file, so that the next one recognizes and deletes what a killed writer left.
    """
    for left in glob.glob(f"{glob.escape(str(path))}.????????.partial"):
        with contextlib.suppress(OSError, ValueError), to_write(Path(left)) as abandoned:
            fcntl.flock(abandoned, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(left)
    while True:
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        stream = partial.open("xb")
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(stream, fcntl.LOCK_EX)
        if partial.exists():  # else another writer has deleted it before it was locked
            break
        stream.close()
    try:
        with stream:
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


def not_a_link(path: Path) -> Path:
    """Return the path of a folder that the product names inside a folder of unknown origin; raise a ValueError if it is a link."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and files would be written to its target: delete the link, or choose another path")
    return path


def own_folder(path: Path) -> None:
    """Create such a folder, with its parents, if it does not exist; raise a ValueError if it is a link."""
    not_a_link(path).mkdir(parents=True, exist_ok=True)


def full_disk(error: Exception, folder: Path) -> str | None:
    """Return a line with the bytes in `folder` and those still free if `error` means that its disk is full, else None.

    Python reports it as an OSError, safetensors in a text, and torch's writer of zip files as a position that it did not expect.
    """
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    torchs = isinstance(error, RuntimeError) and ("unexpected pos" in str(error) or "PytorchStreamWriter" in str(error)) and free < 2**24
    if not torchs and getattr(error, "errno", None) != errno.ENOSPC and "No space left" not in str(error):
        return None
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{used:,} bytes were written and {free:,} are free: No space left on device"


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `output` when the block succeeds, and is removed when it fails.

    The folder is locked meanwhile, so that the next conversion recognizes and deletes what a killed one left.

    Raises:
        ValueError: if `output` exists and is not an empty folder, another conversion is writing it, or it cannot be written (full disk,
            permissions).
    """
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(f"--output {output} exists and is not an empty folder: choose another, since nothing is overwritten")
        output = output.absolute()  # so that "." has a name too
        partial = output.with_name(output.name + ".partial")
        new_parents = [folder for folder in output.parents if not folder.exists()]
        own_folder(partial)
        with to_write(partial / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                for left in partial.iterdir():
                    if left.name != _LOCK:
                        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
                yield partial
                (partial / _LOCK).unlink()
                partial.rename(output)
            except Exception as error:
                if (full := full_disk(error, partial)) is None:
                    raise
                raise OSError(full) from None
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                for folder in new_parents:
                    with contextlib.suppress(OSError):
                        folder.rmdir()  # succeeds only if it is empty
    except BlockingIOError:
        raise ValueError(f"{partial} is being written by another conversion: wait for it, or choose another --output") from None
    except OSError as error:
        raise ValueError(f"cannot write {output} ({error}): free space, or choose another folder") from None
