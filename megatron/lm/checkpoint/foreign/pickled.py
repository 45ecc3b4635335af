"""Parse tensors of torch's distributed checkpoint (DCP), the format of Megatron-LM, without executing a pickle.

The plan of such a checkpoint is a pickle, and each chunk is a zip file of `torch.save` with another pickle. The trainer's own checkpoints
contain no pickle.

torch's `weights_only` unpickler reads protocol 2 alone, and DCP writes its plan in Python's newest protocol. So this is Python's unpickler
with a restricted `find_class`, and it creates no object of any class: a name is a `Name`, a call or a new object is a `Record` of that name
and its arguments, and BUILD, which could otherwise change a permitted class, sets the state of a record. Names are restricted to a short
list, and operations to those that torch's writers use. The result is text, numbers, lists and records, from which the plan is built.
"""

import io
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.lm.checkpoint.files.index import DTYPES, Chunk, Entry, Plan, natural, size

PLAN_FILE = ".metadata"
_DCP, _FILES, _PATHS = "torch.distributed.checkpoint.metadata ", "torch.distributed.checkpoint.filesystem ", ("pathlib ", "pathlib._local ")
_STORAGES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch BFloat16Storage": torch.bfloat16,
    "torch HalfStorage": torch.float16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
_MOST_VALUES = 2**20
_BITS = "torch.storage UntypedStorage"  # its dtype is stored separately
_PLANNER = "torch.distributed.checkpoint.planner "
_METADATA = (_DCP + "Metadata", "megatron.core.dist_checkpointing.strategies.torch MCoreMetadata")
_OBJECT = _DCP + "BytesStorageMetadata"
# Names that torch's files call or instantiate; all other permitted names are dtypes or storages.
_CALLED = {
    *(_DCP + name for name in ("TensorProperties", "_MEM_FORMAT_ENCODING", "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata")),
    *(_DCP + "MetadataIndex", _DCP + "StorageMeta", _DCP + "BytesStorageMetadata", _FILES + "_StorageInfo"),
    *("torch Size", "torch.serialization _get_layout"),
    # The plan of each rank, which Megatron-LM stores for later saves, and megatron-core's own class of earlier versions.
    *(_PLANNER + name for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    "megatron.core.dist_checkpointing.strategies.torch MCoreMetadata",
    "megatron.core.dist_checkpointing.strategies.torch MCoreSavePlan",
    *(path + name for path in _PATHS for name in ("PosixPath", "Path")),
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", "collections OrderedDict"),
}
# Members of enumerations: CLASS(value), or, written by Python 3.11.0 to 3.11.3, getattr(CLASS, name). Torch's own files use protocol 2,
# which has Python 2's name of the module.
_GETATTR, _ENUMS = ("builtins getattr", "__builtin__ getattr"), (_DCP + "_MEM_FORMAT_ENCODING", _PLANNER + "WriteItemType")
_DTYPE_NAMES = {f"torch {name}": dtype for name, dtype in DTYPES.items()}
_NAMED = _CALLED | _STORAGES.keys() | {_BITS} | _DTYPE_NAMES.keys()
# Modules of names in an argparse.Namespace and other plain state, which are never imported, called or built.
PLAIN_MODULES = (
    *("argparse", "collections", "datetime", "enum", "megatron", "nemo", "numpy", "pathlib", "signal", "torch", "transformer_engine"),
    "types",
)
# Of the unpickler's operations; DICT, INST, OBJ, sets, extensions and others are in no file of torch.
_OPERATIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "GLOBAL", "STACK_GLOBAL", "BINPERSID", "SETITEM", "SETITEMS", "APPEND", "APPENDS"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINBYTES", "SHORT_BINBYTES"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
)


class Pairs:
    """A dictionary as a list of pairs, so that keys are never hashed: the hash of a tuple that repeats itself takes exponential time."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))


class Record(Pairs):
    """A call or a new object of a pickle: the name of the function or class, its arguments, the state that BUILD would set, and in `pairs`
    what it would put into a subclass of dict."""

    __match_args__ = ("name", "args", "state", "pairs")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.name, self.args = name, args
        self.state: list[Any] = []


@dataclass(frozen=True, eq=False)
class Name:
    """A name that a pickle would import: "MODULE NAME". `plain`: whether any name of a permitted module may be called."""

    name: str
    plain: bool

    def __call__(self, *args: Any) -> Record:
        match args:
            case (Name(enum), str() as member) if self.name in _GETATTR and (enum in _ENUMS or self.plain):
                return Record(enum, (member,))
        if self.name in _GETATTR:
            raise ValueError(f"it names {self.name.replace(' ', '.')!r}, which is not allowed in a checkpoint")
        if self.name not in _CALLED and (not self.plain or self.name in _DTYPE_NAMES):
            raise ValueError(f"it calls {self.name}, which is not allowed in a checkpoint")
        return Record(self.name, args)


class _Unpickler(pickle._Unpickler):
    """Python's unpickler in Python, whose memo is a dictionary: that in C allocates memory for the largest index that a pickle names.

    `modules`: top-level modules of which a pickle may contain any name.
    """

    stack: list[Any]  # of `pickle._Unpickler`

    def __init__(self, data: bytes, modules: Sequence[str]) -> None:
        super().__init__(io.BytesIO(data), fix_imports=False)
        self.modules = frozenset(modules)

    def find_class(self, module: str, name: str) -> Name:
        known = f"{module} {name}" in _NAMED or f"{module} {name}" in _GETATTR
        if not known and module.partition(".")[0] not in self.modules:
            raise ValueError(f"it names '{module}.{name}', which is not allowed in a checkpoint")
        return Name(f"{module} {name}", bool(self.modules))

    def persistent_load(self, pid: Any) -> Record:
        return Record("persistent", tuple(pid))

    def table(self) -> None:
        self.stack.append(Pairs())

    def call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Name):
            raise ValueError(f"it calls a {type(function).__name__}")
        self.stack.append(function(*args))

    def build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, Record) or record.state:
            raise ValueError(f"it sets the state of a {type(record).__name__}, or sets one object twice")
        record.state.append(state)

    dispatch: ClassVar[dict[int, Any]] = {
        **{getattr(pickle, operation)[0]: pickle._Unpickler.dispatch[getattr(pickle, operation)[0]] for operation in _OPERATIONS},
        pickle.EMPTY_DICT[0]: table,
        pickle.REDUCE[0]: call,
        pickle.NEWOBJ[0]: call,
        pickle.BUILD[0]: build,
    }


def interpreted(data: bytes, modules: Sequence[str] = ()) -> Any:
    """Parse a pickle of torch's distributed checkpoint to text, numbers, tuples, lists, `Pairs`, `Name`s and `Record`s.

    Args:
        data: the pickle.
        modules: top-level modules of which it may contain any name, as text, in addition to names for tensors and the plan.

    Raises:
        ValueError: if it is not such a pickle, or has another operation.
    """
    try:
        return _Unpickler(data, modules).load()
    except ValueError:
        raise
    except Exception as error:  # whatever the operations of a damaged pickle raise
        raise ValueError(f"it is not a pickle of a checkpoint: {type(error).__name__}: {error}") from None


def _fields(record: Any, name: str) -> dict[str, Any]:
    """Return the attributes of a record of the class `name`."""
    if not isinstance(record, Record) or record.name != name or not record.state or not isinstance(record.state[0], Pairs):
        raise ValueError(f"it has something other than a {name.rpartition(' ')[2]}")
    return {key: value for key, value in record.state[0].pairs if isinstance(key, str)}


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if type(value) is not Pairs:
        raise ValueError("it has something other than a table")
    return value.pairs


def _size(record: Any) -> torch.Size:
    match record:
        case Record("torch Size", (tuple(numbers),)):
            return size(numbers)
    raise ValueError("it has something other than a shape")


def _dtype(properties: Any) -> torch.dtype:
    match properties:
        case Record(_, (), [(Name(name), *_)]) if name in _DTYPE_NAMES:
            return _DTYPE_NAMES[name]
    raise ValueError("it has a tensor of an unsupported dtype")


def plan_of_pickle(data: bytes) -> Plan:
    """Return the plan in the pickle `.metadata`, where each chunk is a zip file. Objects that are not tensors are arbitrary pickles, which
    are not read.

    Raises:
        ValueError: if it has no valid plan.
    """
    content = interpreted(data)
    root = _fields(content, _METADATA[1] if isinstance(content, Record) and content.name == _METADATA[1] else _METADATA[0])
    where: dict[tuple[str, torch.Size], tuple[str, int, int]] = {}
    for index, info in _pairs(root.get("storage_data")):
        match _fields(index, _DCP + "MetadataIndex"), _fields(info, _FILES + "_StorageInfo"):
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
    for key, record in _pairs(root.get("state_dict_metadata")):
        if isinstance(record, Record) and record.name == _OBJECT:
            continue
        match key, _fields(record, _DCP + "TensorStorageMetadata"):
            case str(), {"properties": properties, "size": shape, "chunks": list(chunks)} if len(chunks) <= places:
                places -= len(chunks)
                plan[key] = Entry(_dtype(properties), _size(shape), tuple(_chunk(key, chunk, where) for chunk in chunks))
            case _:
                raise ValueError("it has a tensor without a dtype, a shape, or positions of its chunks")
    return plan


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
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            held = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if any(info.compress_type != zipfile.ZIP_STORED for info in held.values()):
                raise ValueError("a chunk is compressed, but torch does not compress")
            pickled, elements = (archive.read(held[name]) for name in ("data.pkl", "data/0"))
            if "byteorder" in held and archive.read(held["byteorder"]) != b"little":
                raise ValueError("a chunk is not little-endian")
    except (zipfile.BadZipFile, KeyError, EOFError, RuntimeError) as error:  # RuntimeError: encrypted
        raise ValueError(f"a chunk is not a tensor file of torch.save ({error})") from None
    match interpreted(pickled):
        case Record("torch._utils _rebuild_tensor_v2", (storage, 0, tuple(sizes), tuple(strides), *_)):
            known_dtype = _STORAGES.get(_storage(storage))
        case Record("torch._utils _rebuild_tensor_v3", (storage, 0, tuple(sizes), tuple(strides), _, _, Name(name), *_)):
            known_dtype = _DTYPE_NAMES.get(name) if _storage(storage) == _BITS else None
        case _:
            raise ValueError("a chunk is not a tensor file of torch.save")
    if known_dtype != dtype or size(sizes) != shape or len(elements) != shape.numel() * dtype.itemsize:
        raise ValueError(f"a chunk is not {tuple(shape)} {dtype}, as in the plan")
    flat = torch.frombuffer(bytearray(elements), dtype=torch.uint8).view(dtype) if elements else torch.empty(0, dtype=dtype)
    try:
        return flat.as_strided(shape, [natural(stride) for stride in strides])
    except RuntimeError:
        raise ValueError("a chunk's strides exceed its storage") from None


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
        return _plain(interpreted(pickled, PLAIN_MODULES), iter(range(_MOST_VALUES)), numbers)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _plain(node: Any, left: Iterator[int], numbers: dict[str, bytes]) -> Any:
    """`left`: has one item per value that may still be read, since nested lists that repeat others grow exponentially. `numbers`: bytes of
    storages that may be a single number.
    """
    if next(left, None) is None:
        raise ValueError(f"it has more than {_MOST_VALUES} values")
    match node:
        case Record("argparse Namespace" | "types SimpleNamespace", _, [Pairs() as table]):
            return _plain(table, left, numbers)
        case Record("collections OrderedDict" | "collections defaultdict", _, _, pairs):
            return {key: _plain(value, left, numbers) for key, value in pairs if isinstance(key, str | int)}
        case Pairs(pairs=pairs) if not isinstance(node, Record):
            return {key: _plain(value, left, numbers) for key, value in pairs if isinstance(key, str | int)}
        case list() | tuple():
            return [_plain(value, left, numbers) for value in node]
        case Record("torch._utils _rebuild_tensor_v2", (Record("persistent", ("storage", Name(name), str(key), *_)), 0, () | (1,), *_)):
            dtype, data = _STORAGES.get(name), numbers.get(key, b"")
            return torch.frombuffer(bytearray(data), dtype=dtype).item() if dtype is not None and len(data) == dtype.itemsize else None
        case None | bool() | int() | float() | str():
            return node
    return None


def _storage(value: Any) -> str:
    match value:
        case Record("persistent", ("storage", Name(name), "0", *_)):
            return name
    return ""
