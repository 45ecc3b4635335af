"""Read a `torch_dist` checkpoint of Megatron-LM from any grid under our names, without executing a pickle.

    iter_0000010/.metadata       the tensors, and file and position of each chunk (a pickle: `pickled`)
    iter_0000010/__0_0.distcp    chunks, each a file of `torch.save`
    iter_0000010/common.pt       the common state: arguments, iteration, schedule and the optimizer's step count (a pickle). From
                                 megatron-core 0.19 on it is a chunk of its own
    iter_0000010/metadata.json   the name of the format

The layout `fully_sharded_model_space`, up to megatron-core 0.14, flattens each tensor-parallel shard of an optimizer state and splits it
over data-parallel ranks: a state of [X, Y] with shards of [x, y] is stored as [X / x, Y / y, x y]. This file joins the shards.
`dp_reshardable` splits the concatenation of all parameters, whose order is not stored, so only weights are read from such a checkpoint.
`_extra_state` (scales and amax histories of Transformer Engine) and random states are not read.
"""

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron.lm.checkpoint.files.index import LARGEST_PLAN, Chunk, Entry, Plan, check, regular_file
from megatron.lm.checkpoint.files.storage import Stored
from megatron.lm.checkpoint.foreign.names import OPTIMIZER, MegatronName, ours
from megatron.lm.checkpoint.foreign.pickled import PLAN_FILE, chunk_of_zip, object_of_pickle, plain_of_zip, plan_of_pickle

COMMON_FILE, FORMAT_FILE = "common.pt", "metadata.json"
_COMMON_OBJECT = "common_state/shard_0_1"  # the first and only part of an object that is cut in one direction
_DP_RESHARDABLE = f"{OPTIMIZER}distributed."


def common_state(folder: Path) -> tuple[Path, bytes]:
    """Return the file of the common state, and the state's bytes, a file of `torch.save`; a ValueError names no file."""
    if (folder / COMMON_FILE).is_file():
        return folder / COMMON_FILE, _bytes(folder / COMMON_FILE)
    try:
        entry = object_of_pickle(_bytes(folder / PLAN_FILE), _COMMON_OBJECT)
        check(folder, {_COMMON_OBJECT: entry})
    except ValueError as error:
        raise ValueError(f"it is missing, and in {PLAN_FILE} {error}") from None
    if entry.chunks[0].length > LARGEST_PLAN:
        raise ValueError(f"{_COMMON_OBJECT} is {entry.chunks[0].length} bytes long; the maximum is {LARGEST_PLAN}")
    return folder / entry.chunks[0].file, _chunk_bytes(folder, entry.chunks[0])


def read_common(folder: Path) -> dict[str, Any]:
    """Return the plain values of the common state (`pickled.plain_of_zip`).

    Raises:
        ValueError: if the folder has another format or a HybridModel, or the state cannot be read.
    """
    file = folder / FORMAT_FILE
    try:
        metadata = json.loads(_bytes(file))
        if not isinstance(metadata, dict) or metadata.get("sharded_backend") != "torch_dist":
            raise ValueError("its sharded_backend is not torch_dist; save it with --ckpt-format torch_dist")
        file = folder / COMMON_FILE
        file, data = common_state(folder)
        common = plain_of_zip(data)
        if file.name != COMMON_FILE and isinstance(common, list) and len(common) == 1:
            common = common[0]
        if not isinstance(common, dict):
            raise ValueError("it has no table")
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}); load an older checkpoint") from None
    args = common.get("args")
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        if isinstance(args, dict) and args.get(name):
            raise ValueError(
                f"{folder} has a HybridModel of Megatron-LM, with {name} {args[name]!r}: its attention and its MLPs are layers of their "
                "own, which this trainer does not read. Load a GPTModel's checkpoint (pretrain_gpt.py)"
            )
    return common


def _chunk_bytes(folder: Path, chunk: Chunk) -> bytes:
    with regular_file(folder / chunk.file).open("rb") as stream:
        stream.seek(chunk.start)
        return stream.read(chunk.length)


def _bytes(file: Path) -> bytes:
    if (length := regular_file(file).stat().st_size) > LARGEST_PLAN:
        raise ValueError(f"it is {length} bytes long; the maximum is {LARGEST_PLAN}")
    return file.read_bytes()


@dataclass(frozen=True)
class _Tile(Chunk):
    """A chunk of one of our tensors: consecutive stored chunks, or a layer of one stored chunk."""

    parts: tuple[Chunk, ...]
    layer: int | None = None


class TorchDist(Stored):
    """The tensors of a Megatron-LM checkpoint under our keys: `model/NAME`, and for the optimizer `master/NAME`, `exp_avg/NAME`,
    `exp_avg_sq/NAME` and `step/NAME`.

    Args:
        folder: of the checkpoint.
        common: its common state (`read_common`).
        known: names of the files with checked digests; the plan must not name others. None allows all files of the folder.

    Attributes:
        step: of the optimizer.
        moments_refused: the error message for loading optimizer states that cannot be read; None if they can, or there are none.

    Raises:
        ValueError: if the plan cannot be read, is invalid, or does not match the files.
    """

    def __init__(self, folder: Path, common: Mapping[str, Any], known: Collection[str] | None = None) -> None:
        self.folder = folder
        self.moments_refused: str | None = None
        file = folder / PLAN_FILE
        try:
            plan = plan_of_pickle(_bytes(file))
            if any(key.startswith(_DP_RESHARDABLE) for key in plan):
                self.moments_refused = (
                    f"{folder} stores the optimizer's states as dp_reshardable, which does not record their order: save it in "
                    "Megatron-LM with --dist-ckpt-optim-fully-reshardable, or load only the weights with --no-load-optim or --finetune"
                )
            named = {key: name for key in plan if (name := ours(key)) is not None}
            read = {key: plan[key] for key in named}
            check(folder, read)
            used = {PLAN_FILE, COMMON_FILE} | {chunk.file for entry in read.values() for chunk in entry.chunks}
            if known is not None and not used <= set(known):
                raise ValueError(f"{min(used - set(known))} has no digest in checkpoint.json")
            self.tensors = _translated(plan, named)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read ({error}); load an older checkpoint") from None
        self.step = optimizer_step(common)
        for key in [key for key in self.tensors if key.startswith("exp_avg/")]:
            self.tensors[f"step/{key.removeprefix('exp_avg/')}"] = Entry(torch.float32, torch.Size(()), ())

    def tensor(self, key: str) -> Tensor:
        """Return a whole tensor in its stored dtype."""
        return torch.tensor(float(self.step)) if key.startswith("step/") and key in self.tensors else super().tensor(key)

    def _rows(self, entry: Entry, chunk: Chunk, part: Sequence[slice]) -> Tensor:
        tile = cast("_Tile", chunk)
        if tile.layer is not None:
            return self._stored(entry, tile.parts[0])[tile.layer][tuple(part)]
        flat = [self._stored(entry, stored).flatten() for stored in tile.parts]
        return torch.cat(flat).view(tile.shape)[tuple(part)]

    def _stored(self, entry: Entry, chunk: Chunk) -> Tensor:
        try:
            return chunk_of_zip(_chunk_bytes(self.folder, chunk), entry.dtype, chunk.shape)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.folder / chunk.file} cannot be read ({error}); load an older checkpoint") from None


def optimizer_step(common: Mapping[str, Any]) -> int:
    """Return the optimizer's step count in the common state: in the groups of a distributed optimizer, else next to the states. ValueError
    if it is not an integer in [0, 2^24), up to which FP32 counts."""
    optimizers = [common.get("optimizer")]
    while optimizers:
        here = optimizers.pop(0)
        if isinstance(here, dict):
            for key in ("step", "common_step"):
                if isinstance(here.get(key), int | float):
                    if not 0 <= here[key] < 2**24 or here[key] != int(here[key]):
                        raise ValueError(f"the stored optimizer's {key} is {here[key]}; it must be an integer in [0, 2^24)")
                    return int(here[key])
            optimizers += list(here.values())
        elif isinstance(here, list):
            optimizers += here
    iteration = common.get("iteration")
    return iteration if type(iteration) is int else 0


def _translated(plan: Plan, named: Mapping[str, MegatronName]) -> Plan:
    shapes = {name.name: plan[key].shape for key, name in named.items() if name.prefix == "model"}
    translated: Plan = {}
    for key, name in named.items():
        entry, whole = plan[key], shapes.get(name.name)
        if whole is not None and len(entry.shape) == len(whole) + 1:
            entry = _joined(key, entry, whole)
        if not name.stacked:
            tiles = (c if isinstance(c, _Tile) else _Tile(c.offset, c.shape, c.file, c.start, c.length, (c,)) for c in entry.chunks)
            translated[f"{name.prefix}/{name.name}"] = Entry(entry.dtype, entry.shape, tuple(tiles))
            continue
        for layer in range(entry.shape[0]):
            chunks = tuple(_of_layer(chunk, layer) for chunk in entry.chunks if 0 <= layer - chunk.offset[0] < chunk.shape[0])
            translated[f"{name.prefix}/{name.name.format(layer)}"] = Entry(entry.dtype, entry.shape[1:], chunks)
    return translated


def _of_layer(chunk: Chunk, layer: int) -> _Tile:
    shape, file = chunk.shape[1:], (chunk.file, chunk.start, chunk.length)
    if isinstance(chunk, _Tile):  # a shard of one layer
        return _Tile(chunk.offset[1:], shape, *file, chunk.parts)
    return _Tile(chunk.offset[1:], shape, *file, (chunk,), layer - chunk.offset[0])


def _joined(key: str, entry: Entry, whole: torch.Size) -> Entry:
    """Return a state of `fully_sharded_model_space` in the shape of its weight, with one chunk per tensor-parallel shard."""
    counts, length = entry.shape[:-1], entry.shape[-1]
    if any(count == 0 or size % count for size, count in zip(whole, counts, strict=True)):
        raise ValueError(f"{key!r} is {tuple(entry.shape)}, which does not divide the shape {tuple(whole)} of its weight into shards")
    shape = torch.Size(size // count for size, count in zip(whole, counts, strict=True))
    if shape.numel() != length or any(any(n != 1 for n in chunk.shape[:-1]) for chunk in entry.chunks):
        raise ValueError(f"{key!r} is {tuple(entry.shape)}, but shards of {tuple(shape)} elements are required")
    parts = sorted((chunk for chunk in entry.chunks if chunk.shape.numel()), key=lambda chunk: chunk.offset)
    tiles = []
    for shard, group in itertools.groupby(parts, key=lambda chunk: chunk.offset[:-1]):
        pieces = tuple(group)
        offset = tuple(number * size for number, size in zip(shard, shape, strict=True))
        tiles.append(_Tile(offset, shape, pieces[0].file, pieces[0].start, pieces[0].length, pieces))
    return Entry(entry.dtype, whole, tuple(tiles))


def names_of_weights(stored: Stored) -> Iterator[str]:
    """Yield our names of the weights in a checkpoint of Megatron-LM."""
    return (key.removeprefix("model/") for key in stored.tensors if key.startswith("model/"))
