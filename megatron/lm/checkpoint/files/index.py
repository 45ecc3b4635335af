"""The plan of a checkpoint: its tensors, and the file and position of each of their chunks.

A plan may be untrusted. It is JSON, which cannot execute code, and it is checked as a whole before any tensor is read: the chunks of a
tensor cover its shape, each element once; every chunk is in a file of the folder, within its length; no two chunks overlap. So a plan never
reads more bytes than its files have, nor outside their folder.

    {"KEY": {"dtype": "float16", "shape": [6, 8], "chunks": [{"offset": [0, 0], "shape": [6, 8], "file": "__0_0.bin", "start": 0}]}}

The bytes of a chunk from `start` on are its elements in row-major order, little-endian.
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

from megatron.lm.shell.files import to_write

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
        shape: of the chunk.
        file: name of its file.
        start, length: position and number of its bytes there.
    """

    offset: tuple[int, ...]
    shape: torch.Size
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A stored tensor: dtype, whole shape and chunks."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]


Plan = dict[str, Entry]


def write_plan(file: Path, plan: Mapping[str, Entry]) -> None:
    """Write a plan as JSON and sync it to disk."""
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
    """Parse a plan; raise a ValueError if it is invalid. `check` compares it with the files."""
    try:
        said = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(said, dict):
        raise ValueError("it is not an object of tensors")
    plan: Plan = {}
    for key, value in said.items():
        match value:
            case {"dtype": str(name), "shape": [*shape], "chunks": [*records]} if name in DTYPES:
                dtype, chunks = DTYPES[name], []
            case _:
                raise ValueError(f"{key!r} is invalid: a tensor must have a dtype, a shape and chunks")
        for record in records:
            match record:
                case {"offset": [*offset], "shape": [*own], "file": str(file), "start": start}:
                    part = size(own)
                    chunks.append(Chunk(tuple(size(offset)), part, file, natural(start), part.numel() * dtype.itemsize))
                case _:
                    raise ValueError(f"{key!r} has an invalid chunk: it must have an offset, a shape, a file and a start")
        plan[key] = Entry(dtype, size(shape), tuple(chunks))
    return plan


def natural(number: Any) -> int:
    """Return `number` if it is an integer from 0 to the length of the largest file; else raise a ValueError."""
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError("a number in it is not an integer in [0, 2^63)")
    return number


def size(numbers: Iterable[Any]) -> torch.Size:
    """Return a shape or an offset; raise a ValueError if no tensor can have it."""
    sizes = [natural(number) for number in numbers]
    if len(sizes) > _MOST_DIMS or math.prod(max(1, number) for number in sizes) > _MOST_ELEMENTS:
        raise ValueError(f"a shape in it has more than {_MOST_DIMS} dimensions, or more than 2^48 elements")
    return torch.Size(sizes)


def check(folder: Path, plan: Plan) -> None:
    """Raise a ValueError if the files of `folder` do not match the plan, or chunks do not cover their tensors."""
    lengths: dict[str, int] = {}
    for key, entry in plan.items():
        check_whole(key, entry)
        for chunk in entry.chunks:
            if Path(chunk.file).name != chunk.file:
                raise ValueError(f"it names {chunk.file!r}, which is outside its folder")
            if chunk.file not in lengths:
                lengths[chunk.file] = regular_file(folder / chunk.file).stat().st_size
            if chunk.start + chunk.length > lengths[chunk.file]:
                raise ValueError(f"{key!r} ends at byte {chunk.start + chunk.length} of {chunk.file}, which has {lengths[chunk.file]}")
            if chunk.shape.numel() * entry.dtype.itemsize > chunk.length:
                raise ValueError(f"{key!r} has a chunk of {tuple(chunk.shape)} {entry.dtype} in {chunk.length} bytes")
    parts = sorted((c.file, c.start, c.start + c.length, key) for key, entry in plan.items() for c in entry.chunks if c.length)
    for (file, _, end, key), (after, start, _, other) in itertools.pairwise(parts):
        if file == after and start < end:
            raise ValueError(f"{key!r} and {other!r} overlap in {file}")


def check_whole(key: str, entry: Entry) -> None:
    """Raise a ValueError if the chunks do not cover the tensor, each element once.

    They do if the corners of all chunks, with a negative sign for an odd number of upper ends, sum to the corners of the whole: the corners
    are the mixed difference of the number of times that each element is stored.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, offset, shape in [(-1, (0,) * len(entry.shape), entry.shape), *((1, c.offset, c.shape) for c in entry.chunks)]:
        if len(offset) != len(entry.shape) or len(shape) != len(entry.shape):
            raise ValueError(f"{key!r} is {tuple(entry.shape)}, but one of its chunks has another number of dimensions")
        if any(start + length > whole for start, length, whole in zip(offset, shape, entry.shape, strict=True)):
            raise ValueError(f"{key!r} is {tuple(entry.shape)}; {tuple(shape)} at {offset} is beyond its end")
        for ends in itertools.product((0, 1), repeat=len(shape)):
            corner = tuple(start + end * length for start, end, length in zip(offset, ends, shape, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    if any(corners.values()):
        stored = sum(chunk.shape.numel() for chunk in entry.chunks)
        raise ValueError(f"the chunks of {key!r}, {stored} elements, do not cover its {tuple(entry.shape)}, each element once")


def regular_file(file: Path) -> Path:
    """Return `file` if it is a regular file; raise a ValueError with a fix for a link, a device or a pipe."""
    try:
        mode = file.lstat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise ValueError(f"{file} is missing ({error})") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{file} is a link, a folder or a device; replace it by a regular file")
    return file
