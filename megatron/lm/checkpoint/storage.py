"""Tensors on disk: torch's distributed checkpoint (DCP) written and read piece by piece, without unpickling what a stranger wrote.

A tensor of the model is stored in chunks of any cut; whoever reads asks for a region of it and need not know the cut.
"""

import io
import pickle
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

METADATA_FILE = ".metadata"
# All that torch writes into the pickle of a checkpoint of tensors.
_LEGAL = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "Path"},
    "pathlib._local": {"PosixPath", "Path"},
    "collections": {"OrderedDict"},
}


@dataclass(frozen=True, eq=False)
class Item:
    """A chunk to be stored: `tensor` stands at `offset` of the tensor named `key`, whose whole shape is `shape`."""

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
    """What is to be read: `into` is filled with what stands at `offset` of the tensor named `key`."""

    key: str
    offset: tuple[int, ...]
    into: Tensor


class _SavePlanner(dcp.SavePlanner):
    """Every rank brings its own items; no chunk is in two of them."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.items = {(item.key, item.offset): item for item in items}

    def set_up_planner(self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(item) for item in self.items.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for key, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            stored = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if stored != entry.size.numel():
                raise ValueError(f"{key} has {entry.size.numel()} elements, and the ranks would store {stored}")
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        assert index.offset is not None
        return self.items[index.fqn, tuple(index.offset)].tensor.detach()


def _write_item(item: Item) -> WriteItem:
    offset = torch.Size(item.offset)
    return WriteItem(
        index=MetadataIndex(item.key, offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offset, item.tensor.shape),
            properties=TensorProperties(dtype=item.tensor.dtype),
            size=torch.Size(item.shape),
        ),
    )


def write(folder: Path, items: Iterable[Item], group: dist.ProcessGroup | None = None) -> None:
    """Store the items of all ranks of `group` in `folder`, one file a rank, and `.metadata`; all is on the disk then. Collective.

    `group`: of a backend that moves CPU memory; None: this process alone. Raises what the file system raises, ValueError among others
    where the ranks' items are not a whole tensor, on every rank.
    """
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is not, or need not be
            dcp.save({}, storage_writer=writer, planner=_SavePlanner(items), process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if not isinstance(first, Exception):
            raise first from None  # an interrupt is no failure of the disk
        raise ValueError(str(first)) from None


class _Unpickler(pickle.Unpickler):
    """Reads the classes of DCP's metadata and nothing else: a pickle may otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _LEGAL.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint's metadata")


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / METADATA_FILE
        try:
            with file.open("rb") as stream:
                metadata = _Unpickler(stream).load()
        except Exception as error:  # a damaged pickle raises a different type for each kind of damage
            raise ValueError(f"{file} cannot be read ({error})") from None
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{file} is not a checkpoint's metadata")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"{file} names {info.relative_path!r}, which is outside its folder")
        return metadata


class _LoadPlanner(dcp.LoadPlanner):
    """What `items` ask for goes into the regions."""

    def __init__(self, regions: Sequence[Region], items: list[ReadItem]) -> None:
        self.regions = {(region.key, region.offset): region for region in regions}
        self.items = items

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self.items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.offset is not None
        target = self.regions[read_item.dest_index.fqn, tuple(read_item.dest_index.offset)].into
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class Stored:
    """The tensors of one checkpoint.

    Args:
        folder: of the checkpoint.

    Attributes:
        tensors: what is stored, by key: dtype (`properties.dtype`), whole shape (`size`) and `chunks`.

    Raises:
        ValueError: the metadata cannot be read, or it leads out of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _Reader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: entry for key, entry in self._metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, regions: Sequence[Region]) -> None:
        """Fill the regions, CPU tensors of the stored dtypes.

        Raises:
            ValueError: a region is not in the checkpoint, or a file cannot be read.
        """
        items: list[ReadItem] = []
        for region in regions:
            entry = self._entry(region.key)
            chunk = ChunkStorageMetadata(torch.Size(region.offset), region.into.shape)
            found = create_read_items_for_chunk_list(region.key, entry, [chunk])
            if sum(item.lengths.numel() for item in found) != region.into.numel():
                raise ValueError(
                    f"{self.folder}: {region.key} is {tuple(entry.size)}; {tuple(chunk.sizes)} at {region.offset} is not all there"
                )
            items += found
        planner = _LoadPlanner(regions, items)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:  # torch raises a different type for each kind of damage
            raise ValueError(f"{self.folder} cannot be read ({str(error).strip().partition(chr(10))[0]})") from None

    def tensor(self, key: str) -> Tensor:
        """A whole tensor, in the dtype in which it is stored."""
        entry = self._entry(key)
        into = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.read([Region(key, (0,) * into.dim(), into)])
        return into

    def _entry(self, key: str) -> TensorStorageMetadata:
        if key not in self.tensors:
            raise ValueError(f"{self.folder} holds no {key}")
        return self.tensors[key]
