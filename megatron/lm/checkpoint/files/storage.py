"""Tensors on disk: every rank writes, a reader reads piece by piece, and no byte is code that runs.

A tensor of the model is stored in chunks of any cut; a reader asks for a region of it and need not know the cut. Each rank writes the
bytes of its chunks into a file of its own, and the first of them the plan (`plan`), which says where each chunk lies. Neither is a pickle.
"""

import io
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
from megatron.lm.shell.opening import to_write


@dataclass(frozen=True, eq=False)
class Item:
    """A chunk to be stored: `tensor` stands at `offset` of the tensor named `key`, of the whole shape `shape`."""

    key: str
    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @staticmethod
    def whole(key: str, tensor: Tensor) -> "Item":
        """A tensor that is one chunk."""
        return Item(key, tensor, tuple(tensor.shape), (0,) * tensor.dim())


@dataclass(frozen=True, eq=False)
class Region:
    """A region to read: `into` is filled from `offset` of the tensor named `key`."""

    key: str
    offset: tuple[int, ...]
    into: Tensor


def write(folder: Path, items: Iterable[Item], group: dist.ProcessGroup | None = None) -> None:
    """Store the items of all ranks of `group` in `folder`, one file a rank, and the plan; all is on the disk then. Collective.

    `group`: of a backend that moves CPU memory; None: this process alone.

    Raises:
        ValueError: on every rank, where one cannot write, or the ranks' items are not whole tensors; where the plan cannot be written, on
            the first rank.
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
                raise ValueError(f"{key!r} is {tuple(before.shape)} {before.dtype} on one rank, and another on the next")
            plan[key] = Entry(entry.dtype, entry.shape, before.chunks + entry.chunks)
    for key, entry in plan.items():
        check_whole(key, entry)
    if rank == 0:
        try:
            write_plan(folder / PLAN_FILE, plan)
        except OSError as error:
            raise ValueError(str(error)) from None


def _write_items(file: Path, items: Iterable[Item]) -> Plan:
    """Write one rank's chunks, and say where they lie."""
    plan: Plan = {}
    file.parent.mkdir(parents=True, exist_ok=True)
    with to_write(file, "wb") as stream:
        for item in items:
            if item.tensor.dtype not in DTYPES.values():
                raise ValueError(f"{item.key} is {item.tensor.dtype}; a checkpoint holds {', '.join(DTYPES)}")
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
    """The bytes of a contiguous CPU tensor, where they are."""
    return x.view(-1).view(torch.uint8).numpy().data


class Stored:
    """The tensors of one checkpoint.

    Args:
        folder: of the checkpoint.
        known: names of the files with checked digests; the plan may name no other. None: any of the folder.

    Attributes:
        tensors: the plan: key -> dtype, whole shape and chunks of a stored tensor.

    Raises:
        ValueError: the plan cannot be read, is impossible, or does not fit the files beside it.
    """

    def __init__(self, folder: Path, known: Collection[str] | None = None) -> None:
        self.folder = folder
        file = folder / PLAN_FILE
        try:
            if (length := regular_file(file).stat().st_size) > LARGEST_PLAN:
                raise ValueError(f"it is {length} bytes long; a plan has at most {LARGEST_PLAN}")
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
            ValueError: a region is not in the checkpoint, or a file cannot be read.
        """
        for region in regions:
            entry, shape, found = self._entry(region.key), region.into.shape, 0
            if region.into.dtype != entry.dtype:
                raise ValueError(f"{self.folder}: {region.key} is {entry.dtype}, {region.into.dtype} is wanted; load an older checkpoint")
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
                    found += math.prod(lengths)
            if found != shape.numel():
                raise ValueError(f"{self.folder}: {region.key} is {tuple(entry.shape)}; {tuple(shape)} at {region.offset} is not all there")

    def _rows(self, entry: Entry, chunk: Chunk, part: Sequence[slice]) -> Tensor:
        """A part of a chunk; only its own rows are read."""
        file, row = self.folder / chunk.file, math.prod(chunk.shape[1:]) * entry.dtype.itemsize
        try:
            with regular_file(file).open("rb") as stream:
                shape = (part[0].stop - part[0].start, *chunk.shape[1:]) if part else ()
                found = torch.empty(shape, dtype=entry.dtype)
                stream.seek(chunk.start + (part[0].start * row if part else 0))
                _fill(stream, found)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read ({error}); load an older checkpoint") from None
        return found[(slice(None), *part[1:])] if part else found

    def tensor(self, key: str) -> Tensor:
        """A whole tensor, in the dtype in which it is stored."""
        entry = self._entry(key)
        into = torch.empty(entry.shape, dtype=entry.dtype)
        self.read([Region(key, (0,) * into.dim(), into)])
        return into

    def _entry(self, key: str) -> Entry:
        if key not in self.tensors:
            raise ValueError(f"{self.folder} holds no {key}")
        return self.tensors[key]


def _fill(stream: io.BufferedReader, into: Tensor) -> None:
    memory = _memory(into)
    if (got := stream.readinto(memory)) != len(memory):
        raise ValueError(f"it ends {len(memory) - got} bytes early")
