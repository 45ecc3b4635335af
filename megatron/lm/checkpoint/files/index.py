"""The plan of a checkpoint: which tensors it holds, and where in which file each chunk of them lies.

A plan may come from a stranger. It is JSON, so that nothing in it can run, and it is judged whole before a byte of a tensor is read: the
chunks of a tensor fill its shape, each element once; every chunk lies in a file of the folder, within its length; no two lie on the same
bytes. So a plan never asks for more bytes than its files have, and never for bytes outside their folder.

    {"KEY": {"dtype": "float16", "shape": [6, 8], "chunks": [{"offset": [0, 0], "shape": [6, 8], "file": "__0_0.bin", "start": 0}]}}

The bytes of a chunk, from `start` on, are its elements in row-major order, little-endian.
"""

import itertools
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.lm.shell.opening import to_write

PLAN_FILE = "plan.json"
_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
LARGEST_PLAN = 2**28  # bytes
_MOST_ELEMENTS, _MOST_DIMS = 2**48, 8


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor.

    Attributes:
        offset: of its first element in the whole tensor.
        shape: its own.
        file: name of the file it lies in.
        start, length: the bytes there.
    """

    offset: tuple[int, ...]
    shape: torch.Size
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor that is stored: its dtype, its whole shape and its chunks."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]


Plan = dict[str, Entry]


def write_plan(file: Path, plan: Mapping[str, Entry]) -> None:
    """Write a plan as JSON, through to the disk."""
    said = {
        key: {
            "dtype": str(entry.dtype).removeprefix("torch."),
            "shape": list(entry.shape),
            "chunks": [
                {"offset": list(chunk.offset), "shape": list(chunk.shape), "file": chunk.file, "start": chunk.start}
                for chunk in entry.chunks
            ],
        }
        for key, entry in plan.items()
    }
    with to_write(file, "wb") as stream:
        stream.write(json.dumps(said).encode())
        stream.flush()
        os.fsync(stream.fileno())


def plan_of_json(data: bytes) -> Plan:
    """The plan in JSON; ValueError saying what is wrong with it. `check` compares it with the files."""
    try:
        said = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(said, dict):
        raise ValueError("it is no object of tensors")
    return {key: _entry(key, value) for key, value in said.items()}


def _entry(key: str, said: Any) -> Entry:
    match said:
        case {"dtype": str(name), "shape": [*shape], "chunks": [*chunks]} if name in DTYPES:
            return Entry(DTYPES[name], size(shape), tuple(_chunk(key, chunk, DTYPES[name]) for chunk in chunks))
    raise ValueError(f"{key!r} is no tensor of a dtype, a shape and chunks")


def _chunk(key: str, said: Any, dtype: torch.dtype) -> Chunk:
    match said:
        case {"offset": [*offset], "shape": [*shape], "file": str(file), "start": start}:
            own = size(shape)
            return Chunk(tuple(size(offset)), own, file, natural(start), own.numel() * dtype.itemsize)
    raise ValueError(f"{key!r} has a chunk that is none: it wants an offset, a shape, a file and a start")


def natural(number: Any) -> int:
    """`number` if it is an integer from 0 to the length of the largest file; else ValueError."""
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError("a number in it is not a whole one in [0, 2^63)")
    return number


def size(numbers: Iterable[Any]) -> torch.Size:
    """A shape or an offset; ValueError for one that no tensor can have."""
    found = [natural(number) for number in numbers]
    if len(found) > _MOST_DIMS or math.prod(max(1, number) for number in found) > _MOST_ELEMENTS:
        raise ValueError(f"a shape in it has more than {_MOST_DIMS} dimensions, or more than 2^48 elements")
    return torch.Size(found)


def check(folder: Path, plan: Plan) -> None:
    """ValueError where the files of `folder` do not hold what the plan says, or chunks are not whole tensors."""
    lengths: dict[str, int] = {}
    for key, entry in plan.items():
        check_whole(key, entry)
        for chunk in entry.chunks:
            if chunk.file not in lengths:
                lengths[chunk.file] = _length(folder, chunk.file)
            if chunk.start + chunk.length > lengths[chunk.file]:
                raise ValueError(f"{key!r} ends at byte {chunk.start + chunk.length} of {chunk.file}, which has {lengths[chunk.file]}")
            if chunk.shape.numel() * entry.dtype.itemsize > chunk.length:
                raise ValueError(f"{key!r} has a chunk of {tuple(chunk.shape)} {entry.dtype} in {chunk.length} bytes")
    parts = sorted((c.file, c.start, c.start + c.length, key) for key, entry in plan.items() for c in entry.chunks if c.length)
    for (file, _, end, key), (after, start, _, other) in itertools.pairwise(parts):
        if file == after and start < end:
            raise ValueError(f"{key!r} and {other!r} lie on the same bytes of {file}")


def check_whole(key: str, entry: Entry) -> None:
    """ValueError where the chunks do not fill the tensor, each of its elements once.

    They fill it if the corners of all chunks, those with an odd number of ends counted negative, add up to the corners of the whole: the
    corners are the mixed difference of how often each element is stored.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, offset, shape in [(-1, (0,) * len(entry.shape), entry.shape), *((1, c.offset, c.shape) for c in entry.chunks)]:
        if len(offset) != len(entry.shape) or len(shape) != len(entry.shape):
            raise ValueError(f"{key!r} is {tuple(entry.shape)}, and a chunk of it has another number of dimensions")
        if any(start + length > whole for start, length, whole in zip(offset, shape, entry.shape, strict=True)):
            raise ValueError(f"{key!r} is {tuple(entry.shape)}; {tuple(shape)} at {offset} is beyond its end")
        for ends in itertools.product((0, 1), repeat=len(shape)):
            corner = tuple(start + end * length for start, end, length in zip(offset, ends, shape, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    if any(corners.values()):
        stored = sum(chunk.shape.numel() for chunk in entry.chunks)
        raise ValueError(f"the chunks of {key!r}, {stored} elements, do not fill its {tuple(entry.shape)}, each of its elements once")


def _length(folder: Path, name: str) -> int:
    if Path(name).name != name:
        raise ValueError(f"it names {name!r}, which is outside its folder")
    return regular_file(folder / name).stat().st_size


def regular_file(file: Path) -> Path:
    """`file` if it is a regular file; ValueError with the remedy for a link, a device or a pipe."""
    try:
        mode = file.lstat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise ValueError(f"{file} is missing ({error})") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{file} is no file but a link, a folder or a device; put the file itself there")
    return file
