"""A cache of arrays that take long to make, such as the order of the samples: made once, kept on disk, read by every process of every run.

    FOLDER/NAME-ARRAY.npy   an array as NumPy writes it, without pickle
    FOLDER/NAME.json        the size and the SHA-256 of each array's file, written last

An array is taken from the disk only where its file is the one that was written. A file that a kill, a failing disk or another job has left
differently is made anew, with a line that says so. An array that cannot be written is kept in memory. So a cache decides how fast a run
starts, never whether it does, nor what it reads.

megatron-core keeps its indices by `numpy.save` and `numpy.load(allow_pickle=True)`: a kill while one is written leaves a file that ends
every later start, and a file from elsewhere runs what its author wants. `order` therefore puts this in their place.
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

from megatron.lm.shell.durable import written_aside
from megatron.lm.shell.opening import read_text, to_write

LOCK_FILE = ".lock"
Arrays = tuple[np.ndarray, ...]


def kept(folder: Path, name: str, arrays: tuple[str, ...], make: Callable[[], Arrays], *, writes: bool) -> Arrays:
    """The arrays of `make`: mapped from `folder`, read-only, if they are whole there; else made, and with `writes` written there.

    Args:
        folder: where the files lie; it exists.
        name: of this set of arrays. Another `make` needs another name.
        arrays: the name of each array.
        make: gives them in this order, the same at every call; none is empty or holds objects.
        writes: whether this process may write. Of several that start together one should, and the others call this later.
    """
    try:
        return _read(folder, name, arrays)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as problem:
        print(f"index cache {folder / name} does not fit ({problem}): it is made anew", flush=True)
    made = make()
    if not writes:
        print(f"index cache {folder / name} cannot be read here: this process makes it in its own memory", flush=True)
        return made
    try:
        _write(folder, name, dict(zip(arrays, made, strict=True)))
        return _read(folder, name, arrays)
    except (OSError, ValueError) as problem:
        print(f"warning: index cache {folder / name} cannot be kept ({problem}): every process makes it in its own memory", flush=True)
        return made


def _read(folder: Path, name: str, arrays: tuple[str, ...]) -> Arrays:
    """FileNotFoundError where nothing was kept; another OSError, or ValueError, where it is not what was written."""
    entries = json.loads(read_text(folder / f"{name}.json"))
    files = {array: folder / f"{name}-{array}.npy" for array in arrays}
    if not isinstance(entries, dict) or entries.keys() != files.keys():
        raise ValueError(f"{name}.json does not list {', '.join(arrays)}")
    for array, file in files.items():
        if not file.is_file() or _entry(file) != entries[array]:
            raise ValueError(f"{file.name} is not the file that was written")
    return tuple(np.lib.format.open_memmap(file, mode="r") for file in files.values())  # which refuses pickles


def _write(folder: Path, name: str, arrays: Mapping[str, np.ndarray]) -> None:
    with to_write(folder / LOCK_FILE) as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another job that starts now writes the same: it is left to it
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
