"""Tensors on disk: any cut in, any region out, every bit kept."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers import tiny
from megatron.lm.checkpoint.files.index import PLAN_FILE
from megatron.lm.checkpoint.files.storage import Item, Region, Stored, write

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int64, torch.float64)
WHOLE = torch.arange(48, dtype=torch.float32).reshape(6, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One tensor of 6 x 8 in three chunks, and a number."""
    cuts = [(slice(0, 2), slice(0, 8)), (slice(2, 6), slice(0, 5)), (slice(2, 6), slice(5, 8))]
    items = [Item("model/w", WHOLE[cut].contiguous(), (6, 8), (cut[0].start, cut[1].start)) for cut in cuts]
    write(tmp_path, [*items, Item.whole("step/w", torch.tensor(7.0))])
    return tmp_path


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
    # A view is stored without what it is a view of.
    assert (tmp_path / "__0_0.bin").stat().st_size == raw.nbytes + dtype.itemsize


@pytest.mark.parametrize(("rows", "columns"), [((0, 6), (0, 8)), ((1, 4), (3, 7)), ((2, 3), (5, 6)), ((5, 6), (0, 8)), ((3, 3), (0, 8))])
def test_any_region_can_be_read_whatever_the_cut(folder: Path, rows: tuple[int, int], columns: tuple[int, int]):
    wanted = WHOLE[slice(*rows), slice(*columns)]
    into = torch.full(wanted.shape, -1.0)
    Stored(folder).read([Region("model/w", (rows[0], columns[0]), into)])
    assert torch.equal(into, wanted)


def test_a_tensor_that_is_not_whole_is_not_written(tmp_path: Path):
    with pytest.raises(ValueError, match=r"the chunks of 'model/w', 16 elements, do not cover its \(6, 8\)"):
        write(tmp_path, [Item("model/w", WHOLE[:2].contiguous(), (6, 8), (0, 0))])
    assert not (tmp_path / PLAN_FILE).exists()


@pytest.mark.parametrize("damage", ["missing", "empty", "cut short", "a link"])
def test_data_that_cannot_be_read(folder: Path, damage: str):
    """Gone after the plan was judged; before, `test_plan` has it."""
    stored, file = Stored(folder), folder / "__0_0.bin"
    if damage in ("missing", "a link"):
        file.rename(folder / "elsewhere")
        if damage == "a link":
            file.symlink_to("elsewhere")
    else:
        whole = file.read_bytes()
        file.write_bytes({"empty": b"", "cut short": whole[: len(whole) // 3]}[damage])
    with pytest.raises(ValueError, match=f"{file} cannot be read .*; load an older checkpoint"):
        stored.tensor("model/w")
