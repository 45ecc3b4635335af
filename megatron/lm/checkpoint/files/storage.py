"""Tensors on disk: every rank writes its chunks, a reader reads regions, and no file can execute code.

A tensor is stored in chunks of any layout; a reader requests a region and need not know the layout. Each rank writes the bytes of its
chunks to its own file, and the first rank writes the plan (`index`) with the position of each chunk. Neither is a pickle.
"""

import math
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.lm.checkpoint.files.index import (
    DTYPES,
    LARGEST_PLAN,
    PLAN_FILE,
    Chunk,
    Entry,
    Plan,
    check,
    check_whole,
    plan_of_json,
    regular_file,
    write_plan,
)
from megatron.lm.shell.files import to_write


@dataclass(frozen=True, eq=False)
class Item:
    """A chunk to store: `tensor` is at `offset` of the tensor named `key`, whose whole shape is `shape`."""

    key: str
    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @staticmethod
    def whole(key: str, tensor: Tensor) -> "Item":
        """Return the item of a tensor with a single chunk."""
        return Item(key, tensor, tuple(tensor.shape), (0,) * tensor.dim())


@dataclass(frozen=True, eq=False)
class Region:
    """A region to read: `into` is filled from `offset` of the tensor named `key`."""

    key: str
    offset: tuple[int, ...]
    into: Tensor


def write(folder: Path, items: Iterable[Item], group: dist.ProcessGroup | None = None) -> None:
    """Write the items of all ranks of `group` to `folder`, one file per rank, and the plan, and sync them to disk. Collective.

    `group`: with a backend for CPU tensors; None is this process alone.

    Raises:
        ValueError: on every rank, if one cannot write or the ranks' items do not cover whole tensors; on the first rank, if the plan cannot
            be written.
    """
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    own: Plan | str
    try:
        own = _write_items(folder / f"__{rank}_0.bin", items)
    except (OSError, RuntimeError, ValueError) as error:
        own = str(error)
    parts: list[Plan | str] = [own] * ranks
    if group is not None:
        dist.all_gather_object(parts, own, group)
    plan: Plan = {}
    for part in parts:
        if isinstance(part, str):
            raise ValueError(part)
        for key, entry in part.items():
            before = plan.setdefault(key, Entry(entry.dtype, entry.shape, ()))
            if (entry.dtype, entry.shape) != (before.dtype, before.shape):
                raise ValueError(f"{key!r} is {tuple(before.shape)} {before.dtype} on one rank, but not on another")
            plan[key] = Entry(entry.dtype, entry.shape, before.chunks + entry.chunks)
    for key, entry in plan.items():
        check_whole(key, entry)
    if rank == 0:
        try:
            write_plan(folder / PLAN_FILE, plan)
        except OSError as error:
            raise ValueError(str(error)) from None


def _write_items(file: Path, items: Iterable[Item]) -> Plan:
    """Write one rank's chunks, and return their positions."""
    plan: Plan = {}
    file.parent.mkdir(parents=True, exist_ok=True)
    with to_write(file, "wb") as stream:
        for item in items:
            if item.tensor.dtype not in DTYPES.values():
                raise ValueError(f"{item.key} is {item.tensor.dtype}; a checkpoint supports {', '.join(DTYPES)}")
            data = _memory(item.tensor.detach().cpu().contiguous())
            chunk = Chunk(item.offset, item.tensor.shape, file.name, stream.tell(), len(data))
            stream.write(data)
            before = plan.get(item.key)
            chunks = (*(before.chunks if before else ()), chunk)
            plan[item.key] = Entry(item.tensor.dtype, torch.Size(item.shape), chunks)
        stream.flush()
        os.fsync(stream.fileno())
    return plan


def _memory(x: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return x.view(-1).view(torch.uint8).numpy().data


class Stored:
    """The tensors of one checkpoint.

    Args:
        folder: of the checkpoint.
        known: names of the files with checked digests; the plan must not name others. None allows all files of the folder.

    Attributes:
        tensors: the plan: key -> dtype, whole shape and chunks of a stored tensor.

    Raises:
        ValueError: if the plan cannot be read, is invalid, or does not match the files.
    """

    def __init__(self, folder: Path, known: Collection[str] | None = None) -> None:
        self.folder = folder
        file = folder / PLAN_FILE
        try:
            if (length := regular_file(file).stat().st_size) > LARGEST_PLAN:
                raise ValueError(f"it is {length} bytes long; the maximum is {LARGEST_PLAN}")
            self.tensors = plan_of_json(file.read_bytes())
            check(folder, self.tensors)
            used = {file.name} | {chunk.file for entry in self.tensors.values() for chunk in entry.chunks}
            if known is not None and not used <= set(known):
                raise ValueError(f"{min(used - set(known))} has no digest in checkpoint.json")
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read ({error}); load an older checkpoint") from None

    def read(self, regions: Sequence[Region]) -> None:
        """Fill the regions, CPU tensors of the stored dtypes.

        Raises:
            ValueError: if a region is not in the checkpoint, or a file cannot be read.
        """
        for region in regions:
            entry, shape, elements = self._entry(region.key), region.into.shape, 0
            if region.into.dtype != entry.dtype:
                raise ValueError(f"{self.folder}: {region.key} is {entry.dtype}, expected {region.into.dtype}; load an older checkpoint")
            for chunk in entry.chunks if len(entry.shape) == len(shape) else ():
                low = [max(a, b) for a, b in zip(region.offset, chunk.offset, strict=True)]
                ends = zip(region.offset, shape, chunk.offset, chunk.shape, strict=True)
                lengths = [min(a + n, b + m) - start for (a, n, b, m), start in zip(ends, low, strict=True)]
                if all(length > 0 for length in lengths):
                    target, source = (
                        [slice(start - base, start - base + length) for start, base, length in zip(low, offset, lengths, strict=True)]
                        for offset in (region.offset, chunk.offset)
                    )
                    region.into[tuple(target)] = self._rows(entry, chunk, source)
                    elements += math.prod(lengths)
            if elements != shape.numel():
                raise ValueError(f"{self.folder}: {region.key} is {tuple(entry.shape)}; {tuple(shape)} at {region.offset} is not all in it")

    def _rows(self, entry: Entry, chunk: Chunk, part: Sequence[slice]) -> Tensor:
        """Return a part of a chunk, reading only its rows."""
        file, row = self.folder / chunk.file, math.prod(chunk.shape[1:]) * entry.dtype.itemsize
        try:
            with regular_file(file).open("rb") as stream:
                shape = (part[0].stop - part[0].start, *chunk.shape[1:]) if part else ()
                values = torch.empty(shape, dtype=entry.dtype)
                stream.seek(chunk.start + (part[0].start * row if part else 0))
                memory = _memory(values)
                if (got := stream.readinto(memory)) != len(memory):
                    raise ValueError(f"it ends {len(memory) - got} bytes early")
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read ({error}); load an older checkpoint") from None
        return values[(slice(None), *part[1:])] if part else values

    def tensor(self, key: str) -> Tensor:
        """Return a whole tensor in its stored dtype."""
        entry = self._entry(key)
        into = torch.empty(entry.shape, dtype=entry.dtype)
        self.read([Region(key, (0,) * into.dim(), into)])
        return into

    def _entry(self, key: str) -> Entry:
        if key not in self.tensors:
            raise ValueError(f"{self.folder} has no {key}")
        return self.tensors[key]
