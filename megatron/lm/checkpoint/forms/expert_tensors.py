"""Read the experts of a checkpoint in either of their two forms, without changing a bit.

Experts in 16 or 32 bits are one tensor per layer and matrix, `NAME` [E, N, K]. FP8 experts are one tensor per expert, `NAME.0` [N, K] to
`NAME.E-1`, each with its own scales and states. A checkpoint has the form of the run that wrote it. A run in the other form, and export to
Hugging Face, which has a tensor per expert, read it through a plan in which chunks are renamed, cut or put together: the bytes of an expert
are contiguous in a chunk of [E, N, K].
"""

import copy
import math
import re
from collections.abc import Collection, Iterator, Sequence

import torch

from megatron.lm.checkpoint.content import at
from megatron.lm.checkpoint.files.index import Chunk, Entry
from megatron.lm.checkpoint.files.storage import Stored

_BESIDE = (".scale_inv", ".max", ".k")  # what a chunk of a tensor may have, as `content` names it
_OF_EXPERT = re.compile(r"(.+\.experts\.fc[12]_weight)\.(\d+)")
_WHOLE = re.compile(r".+\.experts\.fc[12]_weight")

Plan = dict[str, Entry]


def as_wanted(stored: Stored, names: Collection[str]) -> Stored:
    """Return `stored` with experts in the form of `names`, the names of a run's tensors in the whole model; itself if it has that form.

    Raises:
        ValueError: experts of a checkpoint that are not of one shape and dtype, or differ in their number of steps.
    """
    wholes = {name for name in names if _WHOLE.fullmatch(name) and f"model/{name}.0" in stored.tensors}
    parts = {match[1] for name in names if (match := _OF_EXPERT.fullmatch(name)) and f"model/{match[1]}" in stored.tensors}
    return _converted(stored, parts, wholes) if parts or wholes else stored


def separate(stored: Stored) -> Stored:
    """Return `stored` with one tensor per expert; itself if it has no other experts."""
    names = (key.removeprefix("model/") for key in stored.tensors if key.startswith("model/"))
    parts = {name for name in names if _WHOLE.fullmatch(name)}
    return _converted(stored, parts, set()) if parts else stored


def _converted(stored: Stored, divide: Collection[str], join: Collection[str]) -> Stored:
    divided: Plan = {}
    gone: set[str] = set()
    together: dict[str, dict[int, str]] = {}
    for key, entry in stored.tensors.items():
        prefix, _, name = key.partition("/")
        if name in divide:
            count = stored.tensors[f"model/{name}"].shape[0]
            divided |= _parts(stored, key, entry, count)
            gone |= {key, *_keys_beside(stored, key, entry)}
        elif (match := _OF_EXPERT.fullmatch(name)) and match[1] in join:
            together.setdefault(f"{prefix}/{match[1]}", {})[int(match[2])] = key
            gone |= {key, *_keys_beside(stored, key, entry)}
    joined: Plan = {}
    for whole, experts in together.items():
        joined |= _whole(stored, whole, [experts[e] for e in sorted(experts)])
    view = copy.copy(stored)
    view.tensors = {key: entry for key, entry in stored.tensors.items() if key not in gone} | divided | joined
    return view


def _keys_beside(stored: Stored, key: str, entry: Entry) -> Iterator[str]:
    """Iterate over the keys of the additional tensors of a tensor's chunks."""
    yield from (name for chunk in entry.chunks for kind in _BESIDE if (name := at(key + kind, chunk.offset)) in stored.tensors)


def _parts(stored: Stored, key: str, entry: Entry, count: int) -> Plan:
    """Return the entries of each expert of the tensor `key`."""
    if not entry.shape:  # one number for the whole tensor, such as its steps
        return {f"{key}.{e}": entry for e in range(count)}
    if entry.shape[0] != count:
        raise ValueError(f"{stored.folder} is damaged: {key} is {tuple(entry.shape)}, of {count} experts; load an older checkpoint")
    chunks: list[list[Chunk]] = [[] for _ in range(count)]
    plan: Plan = {}
    for chunk in entry.chunks:
        first, *others = chunk.offset
        for number in range(chunk.shape[0]):
            chunks[first + number].append(_slice(chunk, number, others, entry.dtype))
            for kind in _BESIDE:
                beside = stored.tensors.get(at(key + kind, chunk.offset))
                if beside is not None:
                    if beside.shape and (len(beside.chunks) != 1 or beside.shape[0] != chunk.shape[0]):
                        raise ValueError(f"{stored.folder} is damaged: {at(key + kind, chunk.offset)} is {tuple(beside.shape)}")
                    if beside.shape:
                        part = _slice(beside.chunks[0], number, (0,) * (len(beside.shape) - 1), beside.dtype)
                        beside = Entry(beside.dtype, beside.shape[1:], (part,))
                    plan[at(f"{key}.{first + number}{kind}", others)] = beside
    return plan | {f"{key}.{e}": Entry(entry.dtype, entry.shape[1:], tuple(of_expert)) for e, of_expert in enumerate(chunks)}


def _slice(chunk: Chunk, number: int, offset: Sequence[int], dtype: torch.dtype) -> Chunk:
    length = math.prod(chunk.shape[1:]) * dtype.itemsize
    return Chunk(tuple(offset), chunk.shape[1:], chunk.file, chunk.start + number * length, length)


def _whole(stored: Stored, whole: str, keys: Sequence[str]) -> Plan:
    """Return the entries of a tensor of all experts, from each expert's entries: `keys`, by expert."""
    entries = [stored.tensors[key] for key in keys]
    first = entries[0]
    if keys != [f"{whole}.{e}" for e in range(len(keys))] or any((x.dtype, x.shape) != (first.dtype, first.shape) for x in entries):
        raise ValueError(f"{stored.folder}: the experts of {whole} are not of one shape and dtype; load an older checkpoint")
    if not first.shape:
        if any(not torch.equal(stored.tensor(key), stored.tensor(keys[0])) for key in keys[1:]):
            raise ValueError(
                f"{stored.folder}: the experts of {whole} differ, and a run that stores them as one tensor has one number: resume at the "
                "saved --opt-level, or with --no-load-optim"
            )
        return {whole: first}
    chunks: list[Chunk] = []
    plan: Plan = {}
    for e, (key, entry) in enumerate(zip(keys, entries, strict=True)):
        for chunk in entry.chunks:
            chunks.append(_stacked(chunk, e))
            for kind in _BESIDE:
                beside = stored.tensors.get(at(key + kind, chunk.offset))
                if beside is not None:
                    if beside.shape:
                        parts = tuple(_stacked(part, 0) for part in beside.chunks)
                        beside = Entry(beside.dtype, torch.Size([1, *beside.shape]), parts)
                    plan[at(whole + kind, (e, *chunk.offset))] = beside
    return plan | {whole: Entry(first.dtype, torch.Size([len(keys), *first.shape]), tuple(chunks))}


def _stacked(chunk: Chunk, e: int) -> Chunk:
    return Chunk((e, *chunk.offset), torch.Size([1, *chunk.shape]), chunk.file, chunk.start, chunk.length)
