"""Checkpoints that torch's distributed checkpoint wrote: every tensor as torch reads it, and no pickle in them executed."""

import builtins
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.planner import WriteItemType

from helpers import tiny
from megatron.lm.checkpoint.files.index import Plan, check
from megatron.lm.checkpoint.foreign.pickled import PLAN_FILE, chunk_of_zip, interpreted, plan_of_pickle

RAW = torch.randint(0, 256, (16, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
HELD = {
    f"{dtype}/{i}": x
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int64)
    for i, x in enumerate((RAW.view(dtype), RAW.view(dtype)[3, 2], RAW[:0].view(dtype)))
} | {"across": torch.arange(6.0).reshape(2, 3).T}
DATA = "__0_0.distcp"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint by torch alone."""
    dcp.save(dict(HELD), storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    return tmp_path


def metadata(folder: Path) -> Any:
    return pickle.loads((folder / PLAN_FILE).read_bytes())


def rewritten(folder: Path, change: Callable[[Any], object]) -> None:
    held = metadata(folder)
    change(held)
    (folder / PLAN_FILE).write_bytes(pickle.dumps(held))


def checked(folder: Path) -> Plan:
    """The plan, compared with the files beside it."""
    plan = plan_of_pickle((folder / PLAN_FILE).read_bytes())
    check(folder, plan)
    return plan


def refused(folder: Path, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        checked(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_every_tensor_is_read_as_torch_reads_it(folder: Path):
    plan = checked(folder)
    assert plan.keys() == HELD.keys()
    for key, x in HELD.items():
        (chunk,) = plan[key].chunks
        data = (folder / chunk.file).read_bytes()[chunk.start : chunk.start + chunk.length]
        found = chunk_of_zip(data, plan[key].dtype, chunk.shape)
        assert (found.dtype, found.shape) == (x.dtype, x.shape)
        assert tiny.same(tiny.bits([found]), tiny.bits([x.contiguous()])), key


class Runs:
    """Whoever unpickles it calls `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


ENUMS = (_MEM_FORMAT_ENCODING, WriteItemType)


def test_members_of_enumerations_are_read_as_python_3_11_2_writes_them(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """By `getattr`, which Debian 12's Python uses; later ones call the class with the value."""
    plan = checked(folder)
    for enum in ENUMS:
        monkeypatch.setattr(enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    rewritten(folder, lambda held: setattr(held, "planner_data", list(WriteItemType)))
    assert b"getattr" in (folder / PLAN_FILE).read_bytes()
    assert checked(folder) == plan
    (folder / PLAN_FILE).write_bytes(pickle.dumps(metadata(folder), protocol=2))
    assert b"__builtin__\ngetattr" in (folder / PLAN_FILE).read_bytes()
    assert checked(folder) == plan


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (os.system, r"'posix\.system'"),
        (eval, r"'builtins\.eval'"),
        (io.open, r"'_?io\.open'"),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in-metadata"])
def test_a_pickle_that_wants_to_run_code_is_refused_and_does_not_run(folder: Path, function: Callable[..., Any], named: str, inside: bool):
    command = f"touch {folder}/ran" if function is os.system else f"open({str(folder / 'ran')!r}, 'w')"
    evil = Runs(function, command)
    if inside:
        rewritten(folder, lambda held: setattr(held, "planner_data", evil))
    else:
        (folder / PLAN_FILE).write_bytes(pickle.dumps(evil))
    refused(folder, rf"it names {named}, which is not allowed in a checkpoint")
    assert not (folder / "ran").exists()


def text(word: bytes) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word


def named(module: bytes, name: bytes) -> bytes:
    return text(module) + text(name) + b"\x93"


PATH, METADATA = named(b"pathlib", b"PosixPath"), named(b"torch.distributed.checkpoint.metadata", b"_MEM_FORMAT_ENCODING")


@pytest.mark.parametrize("module", ["torch.serialization load", "torch._inductor.codecache write", "megatron.training.training train"])
def test_a_permitted_name_is_not_imported_or_called(module: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builtins, "__import__", None)
    called = interpreted(b"\x80\x04" + named(*map(str.encode, module.split())) + text(b"x") + b"\x85R.")
    assert (called.name, called.args, called.state) == (module, ("x",), None)


@pytest.mark.parametrize("permitted", [PATH, METADATA], ids=["PosixPath", "an enum"])
def test_build_changes_no_class(permitted: bytes):
    """The way past every list of permitted names: BUILD with (None, attributes) sets them on the class itself."""
    evil = b"\x80\x04" + permitted + b"N}" + text(b"canary") + PATH + b"s\x86b."
    victim = pickle.loads(b"\x80\x04" + permitted + b".")
    pickle.loads(evil)
    assert victim.canary is PosixPath  # it would have
    del victim.canary
    with pytest.raises(ValueError, match="setstate"):
        interpreted(evil)
    assert not hasattr(victim, "canary")
    assert not hasattr(interpreted(b"\x80\x04" + permitted + b"."), "canary")


@pytest.mark.parametrize(
    "program",
    {
        "a call of text": text(b"os.system") + b")R",
        "INST": b"(ios\nsystem\n",
        "an extension": b"\x82\x01",
        "nothing to take": b"R",
        "a memory that is empty": b"h\x07",
        "items of no table": b"N(NNu",
        "the largest memory": b"Nr\xff\xff\xff\x7f0",
    }.values(),
)
def test_what_a_pickle_must_not_do(program: bytes):
    with pytest.raises(ValueError, match="it "):
        interpreted(b"\x80\x04" + program + b".")


@pytest.mark.parametrize(
    "damage", [lambda _: b"", lambda whole: whole[:-1], lambda _: bytes(range(256)), lambda _: pickle.dumps(Path("here"))]
)
def test_a_plan_that_cannot_be_read(folder: Path, damage: Callable[[bytes], bytes]):
    file = folder / PLAN_FILE
    file.write_bytes(damage(file.read_bytes()))
    refused(folder, "it ")


def moved(**changes: Any) -> Callable[[Any], object]:
    def change(held: Any) -> None:
        for index, info in held.storage_data.items():
            if index.fqn == "torch.float32/0":
                held.storage_data[index] = _StorageInfo(**(vars(info) | changes))

    return change


def entry(**changes: Any) -> Callable[[Any], object]:
    return lambda held: vars(held.state_dict_metadata["torch.float32/0"]).update(changes)


@pytest.mark.parametrize(
    ("change", "said"),
    {
        "a file above": (moved(relative_path=f"../{DATA}"), "which is outside its folder"),
        "an absolute file": (moved(relative_path="/etc/hostname"), "which is outside its folder"),
        "a file that is no text": (moved(relative_path=7), "it has a chunk without a position"),
        "beyond the file": (moved(offset=10**9), r"ends at byte \d+ of __0_0\.distcp"),
        "a length of 2^62": (moved(length=2**62), "ends at byte"),
        "a negative offset": (moved(offset=-1), "a number in it is not an integer"),
        "too few bytes": (moved(length=100), r"has a chunk of \(16, 8\) torch.float32 in 100 bytes"),
        "no places": (lambda held: held.storage_data.clear(), "it has a tensor without a dtype, a shape, or positions"),
        "a huge shape": (entry(size=torch.Size((2**31, 2**31))), r"more than 2\^48 elements"),
        "a larger shape": (entry(size=torch.Size((17, 8))), r"do not cover its \(17, 8\)"),
        "a shape that is text": (entry(size="16"), "it has something other than a shape"),
        "a tensor without properties": (entry(properties=None), "an unsupported dtype"),
        "tensors that are a list": (lambda held: setattr(held, "state_dict_metadata", []), "something other than a table"),
    }.values(),
)
def test_what_the_plan_must_not_say(folder: Path, change: Callable[[Any], object], said: str):
    rewritten(folder, change)
    refused(folder, said)


# Chunks


def saved(x: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(x, stream)
    return stream.getvalue()


def zipped(change: Callable[[str, bytes], bytes]) -> bytes:
    """A saved tensor with other files in its archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(torch.ones(2, 3)))) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return out.getvalue()


def of(name: str, change: Callable[[bytes], bytes]) -> Callable[[str, bytes], bytes]:
    return lambda file, data: change(data) if file.endswith(name) else data


def test_a_chunk_that_wants_to_run_code_does_not(tmp_path: Path):
    with pytest.raises(ValueError, match="a chunk is not"):
        chunk_of_zip(
            zipped(of("data.pkl", lambda _: pickle.dumps(Runs(os.system, f"touch {tmp_path}/ran")))), torch.float32, torch.Size((2, 3))
        )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("data", "said"),
    {
        "no zip": (lambda: b"noise" * 50, "not a tensor file of torch.save"),
        "cut short": (lambda: saved(torch.ones(2, 3))[:-300], "not a tensor file of torch.save"),
        "another dtype": (lambda: saved(torch.ones(2, 3, dtype=torch.int32)), r"a chunk is not \(2, 3\) torch.float32"),
        "another shape": (lambda: saved(torch.ones(3, 2)), "a chunk is not"),
        "a number": (lambda: saved(7), "a chunk is not"),
        "too few bytes": (lambda: zipped(of("/data/0", lambda data: data[:-4])), "a chunk is not"),
        "strides that lead out": (
            lambda: zipped(of("data.pkl", lambda data: data.replace(b"K\x03K\x01\x86", b"K\x7fK\x01\x86"))),
            "a chunk is not",
        ),
        "elements missing": (lambda: saved(torch.ones(2, 3)).replace(b"data/0", b"data/7"), "not a tensor file of torch.save"),
    }.values(),
)
def test_what_is_no_chunk(data: Callable[[], bytes], said: str):
    with pytest.raises(ValueError, match=said):
        chunk_of_zip(data(), torch.float32, torch.Size((2, 3)))
