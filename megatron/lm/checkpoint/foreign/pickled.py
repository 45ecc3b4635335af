"""Parse tensors of torch's distributed checkpoint (DCP), the format of Megatron-LM, without executing a pickle.

The plan of such a checkpoint is a pickle, and each chunk is a zip file of `torch.save` with another pickle. The trainer's own checkpoints
contain no pickle. torch's `weights_only` unpickler reads the chunks. It reads protocol 2 alone, and DCP writes its plan in Python's newest
protocol; the common state contains arguments of arbitrary classes. Both are read by Python's unpickler, which imports nothing here: in
place of a class or function it gets a stand-in, whose calls and objects are `Record`s of the name and the arguments.
"""

import functools
import io
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.lm.checkpoint.files.index import DTYPES, Chunk, Entry, Plan, natural, size

PLAN_FILE = ".metadata"
_MOST_VALUES = 2**20
_DCP = "torch.distributed.checkpoint.metadata "
_METADATA = (_DCP + "Metadata", "megatron.core.dist_checkpointing.strategies.torch MCoreMetadata")
_INDEX, _STORED = _DCP + "MetadataIndex", "torch.distributed.checkpoint.filesystem _StorageInfo"
_OBJECT = _DCP + "BytesStorageMetadata"
# Modules of the names in the plan and in an argparse.Namespace. None is imported: a name of another module means an attack or damage.
_MODULES = (
    *("argparse", "collections", "datetime", "enum", "megatron", "nemo", "numpy", "pathlib", "signal", "torch", "transformer_engine"),
    "types",
)
# Members of enumerations are CLASS(value), or, written by Python 3.11.0 to 3.11.3, getattr(CLASS, name).
_GETATTR = ("builtins getattr", "__builtin__ getattr")
_DTYPE_NAMES = {f"torch {name}": dtype for name, dtype in DTYPES.items()}
_STORAGES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch BFloat16Storage": torch.bfloat16,
    "torch HalfStorage": torch.float16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
}


class Record(dict[Any, Any]):
    """A call or a new object of a pickle: the name of the function or class, its arguments, and the state that BUILD would set. What a
    pickle would put into a subclass of dict is its content."""

    __match_args__ = ("name", "args", "state")
    __hash__ = object.__hash__  # type: ignore[assignment]  # keys of the plan are records
    name: ClassVar[str]
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "Record":
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __init__(self, *args: Any) -> None:
        """Leave the content empty: a `dict` would take it from the arguments."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Persistent(Record):
    name = "persistent"


class _Unpickler(pickle._Unpickler):
    """Python's unpickler in Python, whose memo is a dictionary: that in C allocates memory for the largest index that a pickle names."""

    def find_class(self, module: str, name: str) -> type[Record]:
        if f"{module} {name}" not in _GETATTR and module.partition(".")[0] not in _MODULES:
            raise ValueError(f"it names '{module}.{name}', which is not allowed in a checkpoint")
        return _stand_in(f"{module} {name}")

    def persistent_load(self, pid: Any) -> Record:
        return _Persistent(*pid)

    def get_extension(self, code: int) -> None:
        raise ValueError(f"it has the extension {code}, which is not allowed in a checkpoint")


@functools.cache
def _stand_in(name: str) -> type[Record]:
    return type(name, (Record,), {"name": name})


def interpreted(data: bytes) -> Any:
    """Parse a pickle to text, numbers, tuples, lists, dictionaries, stand-ins for classes and functions (types), and `Record`s.

    Raises:
        ValueError: if it is not a pickle, or names something outside the modules of torch, Megatron-LM and their arguments.
    """
    try:
        return _Unpickler(io.BytesIO(data), fix_imports=False).load()
    except ValueError:
        raise
    except Exception as error:  # whatever the operations of a damaged pickle raise
        raise ValueError(f"it is not a pickle of a checkpoint: {type(error).__name__}: {error}") from None


def _fields(record: Any, *names: str) -> dict[str, Any]:
    """Return the attributes of a record of one of these classes."""
    if not isinstance(record, Record) or record.name not in names or not isinstance(record.state, dict):
        raise ValueError(f"it has something other than a {names[0].rpartition(' ')[2]}")
    return record.state


def _size(record: Any) -> torch.Size:
    match record:
        case Record("torch Size", (tuple(numbers),)):
            return size(numbers)
    raise ValueError("it has something other than a shape")


def _dtype(properties: Any) -> torch.dtype:
    match properties:
        case Record(_, _, (type() as dtype, *_)) if dtype.__name__ in _DTYPE_NAMES:
            return _DTYPE_NAMES[dtype.__name__]
    raise ValueError("it has a tensor of an unsupported dtype")


def plan_of_pickle(data: bytes) -> Plan:
    """Return the plan in the pickle `.metadata`, where each chunk is a zip file. Objects that are not tensors are arbitrary pickles, which
    are not read.

    Raises:
        ValueError: if it has no valid plan.
    """
    root = _fields(interpreted(data), *_METADATA)
    stored, tensors = root.get("storage_data"), root.get("state_dict_metadata")
    if not isinstance(stored, dict) or not isinstance(tensors, dict):
        raise ValueError("it has something other than a table")
    where: dict[tuple[str, torch.Size], tuple[str, int, int]] = {}
    for index, info in stored.items():
        match _fields(index, _INDEX), _fields(info, _STORED):
            case {"fqn": str(), **rest}, _ if rest.get("offset") is None:
                continue  # an object
            case _, {"transform_descriptors": [*transforms]} if transforms:
                raise ValueError(f"its files are transformed by {transforms[0]!r}; save it without compression or encryption")
            case {"fqn": str(key), "offset": offset}, {"relative_path": str(file), "offset": start, "length": length}:
                where[key, _size(offset)] = file, natural(start), natural(length)
            case _:
                raise ValueError("it has a chunk without a position")
    plan: Plan = {}
    places = len(where)  # chunks cannot be more than their positions, even if the pickle repeats a list
    for key, record in tensors.items():
        if isinstance(record, Record) and record.name == _OBJECT:
            continue
        match key, _fields(record, _DCP + "TensorStorageMetadata"):
            case str(), {"properties": properties, "size": shape, "chunks": list(chunks)} if len(chunks) <= places:
                places -= len(chunks)
                plan[key] = Entry(_dtype(properties), _size(shape), tuple(_chunk(key, chunk, where) for chunk in chunks))
            case _:
                raise ValueError("it has a tensor without a dtype, a shape, or positions of its chunks")
    return plan


def object_of_pickle(data: bytes, key: str) -> Entry:
    """Return the object `key` of the plan in the pickle `.metadata` as an entry of bytes, which are not read.

    Raises:
        ValueError: if it has no such object.
    """
    stored = _fields(interpreted(data), *_METADATA).get("storage_data")
    for index, info in stored.items() if isinstance(stored, dict) else ():
        match _fields(index, _INDEX), _fields(info, _STORED):
            case {"fqn": fqn}, {"relative_path": str(file), "offset": start, "length": length} if fqn == key:
                return Entry(torch.uint8, size([length]), (Chunk((0,), size([length]), file, natural(start), natural(length)),))
    raise ValueError(f"it has no {key}")


def _chunk(key: str, record: Any, where: dict[tuple[str, torch.Size], tuple[str, int, int]]) -> Chunk:
    match _fields(record, _DCP + "ChunkStorageMetadata"):
        case {"offsets": offsets, "sizes": sizes} if (key, _size(offsets)) in where:
            return Chunk(tuple(_size(offsets)), _size(sizes), *where[key, _size(offsets)])
    raise ValueError(f"{key!r} has a chunk without a position")


def chunk_of_zip(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return the tensor in `data`, a file of `torch.save`, which must have this dtype and shape.

    Raises:
        ValueError: if it contains no tensor, or another one.
    """
    try:
        x = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever damaged files raise
        raise ValueError(f"a chunk is not a tensor file of torch.save ({str(error).partition(chr(10))[0]})") from None
    if type(x) is not Tensor or x.layout != torch.strided or x.dtype != dtype or x.shape != shape:
        raise ValueError(f"a chunk is not {tuple(shape)} {dtype}, as in the plan")
    return x


def plain_of_zip(data: bytes) -> Any:
    """Return the plain values in `data`, a file of `torch.save`: an argparse.Namespace or dictionary becomes a `dict` of its text keys, a
    tensor of one element its number, and everything else but numbers, text, lists and tuples (other tensors, classes) None.

    Raises:
        ValueError: if it is not a file of `torch.save`, or has names that are not allowed in a checkpoint.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (name,) = (name for name in archive.namelist() if name.partition("/")[2] == "data.pkl")
            if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed, but torch does not compress")
            pickled, folder = archive.read(name), name.removesuffix("data.pkl")
            small = {info.filename.removeprefix(f"{folder}data/"): info for info in archive.infolist() if 0 < info.file_size <= 8}
            numbers = {key: archive.read(info) for key, info in small.items() if info.compress_type == zipfile.ZIP_STORED}
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        raise ValueError(f"it is not a file of torch.save ({error})") from None
    try:
        return _plain(interpreted(pickled), iter(range(_MOST_VALUES)), numbers)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _plain(node: Any, left: Iterator[int], numbers: dict[str, bytes]) -> Any:
    """`left`: has one item per value that may still be read, since nested lists that repeat others grow exponentially. `numbers`: bytes of
    storages that may be a single number.
    """
    if next(left, None) is None:
        raise ValueError(f"it has more than {_MOST_VALUES} values")
    match node:
        case Record("argparse Namespace" | "types SimpleNamespace", _, dict() as table):
            return _plain(table, left, numbers)
        case Record("torch._utils _rebuild_tensor_v2", (Record("persistent", ("storage", type() as kind, str(key), *_)), 0, () | (1,), *_)):
            dtype, data = _STORAGES.get(kind.__name__), numbers.get(key, b"")
            return torch.frombuffer(bytearray(data), dtype=dtype).item() if dtype is not None and len(data) == dtype.itemsize else None
        case dict() if not isinstance(node, Record) or node.name in ("collections OrderedDict", "collections defaultdict"):
            return {key: _plain(value, left, numbers) for key, value in node.items() if isinstance(key, str | int)}
        case list() | tuple():
            return [_plain(value, left, numbers) for value in node]
        case None | bool() | int() | float() | str():
            return node
    return None
