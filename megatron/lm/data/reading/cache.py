"""Cache arrays that are slow to compute, such as the sample order: built once, stored on disk, read by all processes of all runs.

    FOLDER/NAME-ARRAY.npy   an array in NumPy's format, without pickle
    FOLDER/NAME.json        the size and SHA-256 of each array's file, written last

An array is read from disk only if its file matches the recorded size and hash. A file that does not match, after a kill, a disk failure or
a write by another job, is rebuilt, and a log line reports it. An array that cannot be written is kept in memory. The cache therefore
affects how fast a run starts, but not whether it starts or what it reads.

megatron-core stores its indices with `numpy.save` and `numpy.load(allow_pickle=True)`: a kill during a write leaves a file that breaks
every later start, and a file from elsewhere can run arbitrary code. `order` therefore replaces them with this cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron.lm.shell.files import read_text, to_write, written_aside

LOCK_FILE = ".lock"
Arrays = tuple[np.ndarray, ...]


def kept(folder: Path, name: str, arrays: tuple[str, ...], make: Callable[[], Arrays], *, writes: bool) -> Arrays:
    """Return the arrays of `make`: mapped read-only from `folder` if the files are valid; otherwise rebuilt, and with `writes` stored.

    Args:
        folder: existing folder of the files.
        name: of this set of arrays. Another `make` needs another name.
        arrays: the name of each array.
        make: returns the arrays in this order, identical at every call; none is empty or contains objects.
        writes: whether this process may write. If several start together, one should write, and the others should call this afterwards.
    """
    try:
        return _read(folder, name, arrays)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as problem:
        print(f"index cache {folder / name} is invalid ({problem}): it is rebuilt", flush=True)
    computed = make()
    if not writes:
        print(f"index cache {folder / name} cannot be read here: this process builds it in its own memory", flush=True)
        return computed
    try:
        _write(folder, name, dict(zip(arrays, computed, strict=True)))
        return _read(folder, name, arrays)
    except (OSError, ValueError) as problem:
        print(f"warning: index cache {folder / name} cannot be written ({problem}): every process builds it in its own memory", flush=True)
        return computed


def _read(folder: Path, name: str, arrays: tuple[str, ...]) -> Arrays:
    """Read the arrays. FileNotFoundError if there is no cache; another OSError, or ValueError, if it is not what was written."""
    entries = json.loads(read_text(folder / f"{name}.json"))
    files = {array: folder / f"{name}-{array}.npy" for array in arrays}
    if not isinstance(entries, dict) or entries.keys() != files.keys():
        raise ValueError(f"{name}.json does not list {', '.join(arrays)}")
    for array, file in files.items():
        if not file.is_file() or _entry(file) != entries[array]:
            raise ValueError(f"{file.name} is not the file that was written")
    return tuple(np.lib.format.open_memmap(file, mode="r") for file in files.values())  # rejects pickles


def _write(folder: Path, name: str, arrays: Mapping[str, np.ndarray]) -> None:
    with to_write(folder / LOCK_FILE) as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a job that starts at the same time writes the same arrays
        entries = {}
        for array, values in arrays.items():
            file = folder / f"{name}-{array}.npy"
            with written_aside(file) as stream:
                np.save(stream, values, allow_pickle=False)
            entries[array] = _entry(file)
        with written_aside(folder / f"{name}.json") as stream:
            stream.write(json.dumps(entries).encode())


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
