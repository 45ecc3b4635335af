"""Tensors on disk: any cut in, any region out, every bit kept; and a stranger's files that want more than to be read."""

import errno
import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from megatron.lm.checkpoint.storage import METADATA_FILE, Item, Region, Stored, write

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int64, torch.float64)
WHOLE = torch.arange(48, dtype=torch.float32).reshape(6, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One tensor of 6 x 8 in three chunks, and a number."""
    cuts = [(slice(0, 2), slice(0, 8)), (slice(2, 6), slice(0, 5)), (slice(2, 6), slice(5, 8))]
    items = [Item("model/w", WHOLE[cut].contiguous(), (6, 8), (cut[0].start, cut[1].start)) for cut in cuts]
    write(tmp_path, [*items, Item.whole("step/w", torch.tensor(7.0))])
    return tmp_path


def metadata(folder: Path) -> Any:
    return pickle.loads((folder / METADATA_FILE).read_bytes())


def bits(x: Tensor) -> list[Tensor]:
    return tiny.bits([x])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits_and_its_size(tmp_path: Path, dtype: torch.dtype):
    raw = torch.randint(0, 256, (256, 4 * dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    held = {"matrix": raw.view(dtype), "scalar": raw.view(dtype)[3, 2], "empty": raw[:0].view(dtype)}
    write(tmp_path, [Item.whole(key, x) for key, x in held.items()])
    stored = Stored(tmp_path)
    assert set(stored.tensors) == set(held)
    for key, x in held.items():
        found = stored.tensor(key)
        assert (found.dtype, found.shape) == (dtype, x.shape)
        assert tiny.same(bits(found), bits(x))
    # A view is stored without what it is a view of; torch's frame around each tensor is 1 to 2 KiB.
    assert raw.nbytes < (tmp_path / "__0_0.distcp").stat().st_size < raw.nbytes + 3 * 2048


@pytest.mark.parametrize(("rows", "columns"), [((0, 6), (0, 8)), ((1, 4), (3, 7)), ((2, 3), (5, 6)), ((5, 6), (0, 8)), ((3, 3), (0, 8))])
def test_any_region_can_be_read_whatever_the_cut(folder: Path, rows: tuple[int, int], columns: tuple[int, int]):
    wanted = WHOLE[slice(*rows), slice(*columns)]
    into = torch.full(wanted.shape, -1.0)
    Stored(folder).read([Region("model/w", (rows[0], columns[0]), into)])
    assert torch.equal(into, wanted)


def test_several_regions_go_into_views_of_one_tensor(folder: Path):
    into = torch.full((2, 6, 4), -1.0)
    Stored(folder).read([Region("model/w", (0, 0), into[0]), Region("model/w", (0, 4), into[1])])
    assert torch.equal(torch.cat([into[0], into[1]], dim=1), WHOLE)


def test_what_is_not_there_is_told(folder: Path):
    stored = Stored(folder)
    assert float(stored.tensor("step/w")) == 7
    with pytest.raises(ValueError, match=r"holds no model/v"):
        stored.tensor("model/v")
    with pytest.raises(ValueError, match=r"model/w is \(6, 8\); \(3, 8\) at \(4, 0\) is not all there"):
        stored.read([Region("model/w", (4, 0), torch.empty(3, 8))])


def test_a_tensor_that_is_not_whole_is_not_written(tmp_path: Path):
    with pytest.raises(ValueError, match="model/w has 48 elements, and the ranks would store 16"):
        write(tmp_path, [Item("model/w", WHOLE[:2].contiguous(), (6, 8), (0, 0))])
    assert not (tmp_path / METADATA_FILE).exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_a_write_that_fails_says_why_and_an_interrupt_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException):
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    kind = ValueError if isinstance(error, OSError) else type(error)
    with pytest.raises(kind, match="No space left on device" if isinstance(error, OSError) else None):
        write(tmp_path, [Item.whole("w", WHOLE)])


# Damage


@pytest.mark.parametrize("damage", ["missing", "empty", "cut short", "noise", "another object"])
def test_metadata_that_cannot_be_read(folder: Path, damage: str):
    file = folder / METADATA_FILE
    if damage == "missing":
        file.unlink()
    elif damage == "another object":
        file.write_bytes(pickle.dumps(Path("here")))
    else:
        whole = file.read_bytes()
        file.write_bytes({"empty": b"", "cut short": whole[: len(whole) // 2], "noise": bytes(range(256))}[damage])
    with pytest.raises(ValueError, match=r"\.metadata (cannot be read|is not a checkpoint's metadata)"):
        Stored(folder)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut short", "noise"])
def test_data_that_cannot_be_read(folder: Path, damage: str):
    stored, file = Stored(folder), folder / "__0_0.distcp"
    if damage == "missing":
        file.unlink()
    else:
        whole = file.read_bytes()
        file.write_bytes({"empty": b"", "cut short": whole[: len(whole) // 3], "noise": bytes(256) * 64}[damage])
    with pytest.raises(ValueError, match=f"{folder} cannot be read"):
        stored.tensor("model/w")


# Strangers


class Runs:
    """Whoever unpickles it calls `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (os.system, r"posix\.system"),
        (eval, r"builtins\.eval"),
        (getattr, r"builtins\.getattr"),
        (torch.load, r"torch\.serialization\.load"),
        (io.open, r"_?io\.open"),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in-metadata"])
def test_metadata_that_wants_to_run_code_is_refused_and_does_not_run(folder: Path, function: Callable[..., Any], named: str, inside: bool):
    command = f"touch {folder}/ran" if function is os.system else f"open({str(folder / 'ran')!r}, 'w')"
    evil: Any = Runs(function, command)
    if inside:
        evil = metadata(folder)
        evil.planner_data = Runs(function, command)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(evil))
    with pytest.raises(ValueError, match=rf"\.metadata cannot be read \(it names {named}, which has no place in a checkpoint"):
        Stored(folder)
    assert not (folder / "ran").exists()


def test_a_dotted_name_reaches_nothing_through_a_legal_class(folder: Path):
    # Protocol 4 resolves "Metadata.__init__" in a legal module; the names that are legal hold no dot.
    module, name = b"torch.distributed.checkpoint.metadata", b"Metadata.__init__"
    dotted = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text for text in (module, name)) + b"\x93."
    assert callable(pickle.loads(dotted))
    (folder / METADATA_FILE).write_bytes(dotted)
    with pytest.raises(ValueError, match=r"names torch\.distributed\.checkpoint\.metadata\.Metadata\.__init__"):
        Stored(folder)


@pytest.mark.parametrize("path", ["../secret.distcp", "/etc/hostname", "a/../../secret.distcp", "sub/__0_0.distcp"])
def test_metadata_that_leads_out_of_the_folder_is_refused(folder: Path, path: str):
    evil = metadata(folder)
    evil.storage_data = {index: replace(info, relative_path=path) for index, info in evil.storage_data.items()}
    (folder / METADATA_FILE).write_bytes(pickle.dumps(evil))
    with pytest.raises(ValueError, match=rf"\.metadata names '{path}', which is outside its folder"):
        Stored(folder)


def test_data_that_wants_to_run_code_is_refused_and_does_not_run(folder: Path):
    torch.save(Runs(os.system, f"touch {folder}/ran"), folder / "__0_0.distcp")
    evil = metadata(folder)
    whole = {"offset": 0, "length": (folder / "__0_0.distcp").stat().st_size}
    evil.storage_data = {index: replace(info, **whole) for index, info in evil.storage_data.items()}
    (folder / METADATA_FILE).write_bytes(pickle.dumps(evil))
    with pytest.raises(ValueError, match="cannot be read"):
        Stored(folder).tensor("model/w")
    assert not (folder / "ran").exists()
