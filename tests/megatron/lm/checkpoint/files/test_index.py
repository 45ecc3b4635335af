"""The plan of a checkpoint: what it says comes back, and what it must not say is refused before a tensor is read."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.lm.checkpoint.files.index import PLAN_FILE, Chunk, Entry, check_whole, plan_of_json
from megatron.lm.checkpoint.files.storage import Item, Stored, write

WHOLE = torch.arange(48, dtype=torch.float32).reshape(6, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tensors: `w`, 6 x 8 FP32 in two chunks, and `x`, 4 FP16."""
    parts = [Item("w", WHOLE[row : row + 3], (6, 8), (row, 0)) for row in (0, 3)]
    made = tmp_path / "checkpoint"
    made.mkdir()
    write(made, [*parts, Item.whole("x", torch.ones(4).half())])
    return made


def said(folder: Path) -> dict[str, Any]:
    return json.loads((folder / PLAN_FILE).read_text())


def entry(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Entry:
    chunks = tuple(Chunk(offset, torch.Size(sizes), "f", 0, 0) for offset, sizes in boxes)
    return Entry(torch.float32, torch.Size(shape), chunks)


@pytest.mark.promise("Checkpoints", "No file of a checkpoint is a pickle.")
def test_a_plan_is_json_and_names_every_chunk(folder: Path):
    first, second = ({"offset": [row, 0], "shape": [3, 8], "file": "__0_0.bin", "start": 32 * row} for row in (0, 3))
    last = {"offset": [0], "shape": [4], "file": "__0_0.bin", "start": 192}
    assert said(folder) == {
        "w": {"dtype": "float32", "shape": [6, 8], "chunks": [first, second]},
        "x": {"dtype": "float16", "shape": [4], "chunks": [last]},
    }
    assert (folder / "__0_0.bin").read_bytes()[:192] == WHOLE.numpy().tobytes()
    plan = plan_of_json((folder / PLAN_FILE).read_bytes())
    assert plan["w"].chunks[1] == Chunk((3, 0), torch.Size((3, 8)), "__0_0.bin", 96, 96)


@pytest.mark.promise("Checkpoints", "Chunks cover each tensor exactly once, or the checkpoint is refused.")
def test_chunks_fill_a_tensor_exactly_where_each_element_is_in_one():
    """Against counting, for every set of at most 3 of the boxes of a 2 x 3."""
    sides = [[(start, end) for start in range(n) for end in range(start + 1, n + 1)] for n in (2, 3)]
    boxes = [((a, c), (b - a, d - c)) for (a, b), (c, d) in itertools.product(*sides)]
    whole = 0
    for count in range(4):
        for chosen in itertools.combinations_with_replacement(boxes, count):
            counted = torch.zeros(2, 3)
            for (row, column), (rows, columns) in chosen:
                counted[row : row + rows, column : column + columns] += 1
            if bool((counted == 1).all()):
                check_whole("w", entry((2, 3), *chosen))
                whole += 1
            else:
                with pytest.raises(ValueError, match=r"do not cover its \(2, 3\), each element once"):
                    check_whole("w", entry((2, 3), *chosen))
    assert whole > 5
    check_whole("number", entry((), ((), ())))
    check_whole("nothing", entry((0, 4)))
    with pytest.raises(ValueError, match="do not cover"):
        check_whole("number", entry((), ((), ()), ((), ())))


def first(said: dict[str, Any]) -> dict[str, Any]:
    return said["w"]["chunks"][0]


ATTACKS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a file above": (lambda said: first(said).update(file="../outside"), r"it names '\.\./outside', which is outside its folder"),
    "an absolute file": (lambda said: first(said).update(file="/etc/hostname"), "it names '/etc/hostname', which is outside"),
    "the folder itself": (lambda said: first(said).update(file="."), "which is outside its folder"),
    "the folder above": (lambda said: first(said).update(file=".."), "is a link, a folder or a device"),
    "no file": (lambda said: first(said).update(file="__9_0.bin"), "__9_0.bin is missing"),
    "a NUL in a name": (lambda said: first(said).update(file="a\0b"), "is missing"),
    "a link": (lambda said: first(said).update(file="link"), "link is a link, a folder or a device; replace it by a regular file"),
    "a pipe": (lambda said: first(said).update(file="pipe"), "pipe is a link"),
    "beyond the file": (lambda said: first(said).update(start=192), "'w' ends at byte 288 of __0_0.bin, which has 200"),
    "before the file": (lambda said: first(said).update(start=-4), r"not an integer in \[0, 2\^63\)"),
    "a start of 2^64": (lambda said: first(said).update(start=2**64), r"not an integer in \[0, 2\^63\)"),
    "a start with a fraction": (lambda said: first(said).update(start=0.5), "not an integer"),
    "a start that is true": (lambda said: first(said).update(start=True), "not an integer"),
    "the bytes of another": (lambda said: first(said).update(start=96), "'w' and 'w' overlap in __0_0.bin"),
    "the bytes of another tensor": (lambda said: said["x"]["chunks"][0].update(start=188), "'w' and 'x' overlap"),
    "a chunk twice": (lambda said: said["w"]["chunks"].append(first(said)), r"the chunks of 'w', 72 elements, do not cover its \(6, 8\)"),
    "a chunk too few": (lambda said: said["w"]["chunks"].pop(), "'w', 24 elements, do not cover"),
    "chunks that overlap": (lambda said: first(said).update(offset=[3, 0]), "'w', 48 elements, do not cover"),
    "a chunk beyond the end": (lambda said: first(said).update(offset=[4, 0]), r"'w' is \(6, 8\); \(3, 8\) at \(4, 0\) is beyond its end"),
    "a chunk of other dimensions": (lambda said: first(said).update(offset=[0]), "another number of dimensions"),
    "a huge shape": (lambda said: said["w"].update(shape=[2**40, 2**40]), r"more than 8 dimensions, or more than 2\^48 elements"),
    "a huge shape of nothing": (lambda said: said["w"].update(shape=[0, 2**60, 2**60], chunks=[]), r"more than 2\^48 elements"),
    "1000 dimensions": (lambda said: said["w"].update(shape=[1] * 1000), "more than 8 dimensions"),
    "a large shape": (lambda said: said["w"].update(shape=[2**40]), "another number of dimensions"),
    "a dtype that is none": (lambda said: said["w"].update(dtype="object"), "'w' is invalid: a tensor must have a dtype"),
    "a wider dtype": (lambda said: said["x"].update(dtype="float64"), "'x' ends at byte 224"),
    "no dtype": (lambda said: said["w"].pop("dtype"), "'w' is invalid: a tensor must have a dtype"),
    "a shape that is text": (lambda said: said["w"].update(shape="68"), "'w' is invalid: a tensor must have a dtype"),
    "chunks that are a table": (lambda said: said["w"].update(chunks={}), "'w' is invalid: a tensor must have a dtype"),
    "a chunk that is null": (lambda said: said["w"].update(chunks=[None]), "'w' has an invalid chunk"),
    "a tensor that is a number": (lambda said: said.update(w=1), "'w' is invalid: a tensor must have a dtype"),
}


@pytest.mark.promise("Checkpoints", "No name, link, offset or size in a checkpoint leads outside its files.")
@pytest.mark.parametrize("name", ATTACKS)
def test_what_a_plan_must_not_say(folder: Path, name: str):
    (folder.parent / "outside").write_bytes(bytes(200))
    (folder / "link").symlink_to("../outside")
    os.mkfifo(folder / "pipe")
    plan = said(folder)
    ATTACKS[name][0](plan)
    (folder / PLAN_FILE).write_text(json.dumps(plan))
    with pytest.raises(ValueError, match=ATTACKS[name][1]) as caught:
        Stored(folder)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{folder / PLAN_FILE} cannot be read (")
    assert line.endswith("); load an older checkpoint")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "it is not an object of tensors"),
        ("null", "it is not an object of tensors"),
        ('"w"', "it is not an object of tensors"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"w": NaN}', "'w' is invalid"),
        ("\xff", "codec can't decode"),
        ('{"w": 1' + "0" * 5000 + "}", "Exceeds the limit"),
    ],
)
def test_what_is_no_plan(text: str, said: str):
    with pytest.raises(ValueError, match=said):
        plan_of_json(text.encode("latin-1"))


def test_a_plan_may_be_no_link_and_not_huge(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron.lm.checkpoint.files.storage.LARGEST_PLAN", 20)
    with pytest.raises(ValueError, match=r"plan\.json cannot be read \(it is \d+ bytes long; the maximum is 20\)"):
        Stored(folder)
    (folder / PLAN_FILE).rename(folder.parent / PLAN_FILE)
    (folder / PLAN_FILE).symlink_to(folder.parent / PLAN_FILE)
    with pytest.raises(ValueError, match="is a link"):
        Stored(folder)
