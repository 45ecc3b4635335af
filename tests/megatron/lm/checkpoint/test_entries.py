"""Entries of a checkpoint that do not belong together are refused: a weight and its states, the components of a pair, groups."""

from pathlib import Path

import pytest
import torch

from helpers.choices import every_pair
from megatron.lm.checkpoint.content import scale_key
from megatron.lm.checkpoint.files import storage
from megatron.lm.checkpoint.files.storage import Item, Stored
from megatron.lm.checkpoint.place import Place
from megatron.lm.checkpoint.values import check_remainder, find, find_whole

VOCABULARY = 5
EMBEDDING = "embedding.word_embeddings.weight"


def place(offset: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], name: str = "w") -> Place:
    return Place(name=name, shape=shape, offset=offset, start=0, sizes=sizes, first=True)


def stored(folder: Path, items: list[Item]) -> Stored:
    storage.write(folder, items)
    return Stored(folder)


BF16_FIRST, REST = torch.ones(8, 6).bfloat16(), torch.zeros(8, 6).bfloat16()
PAIRS = {  # first component, remainder, what is said of them
    "a remainder of other rows": (BF16_FIRST, REST[:4], r"is \(4, 6\).*, but its first component .* is \(8, 6\)"),
    "a remainder of one dimension": (BF16_FIRST, REST.reshape(-1), r"is \(48,\).*, but its first component .* is \(8, 6\)"),
    "a remainder of no dimension": (BF16_FIRST, REST[0, 0], r"is \(\).*, but its first component .* is \(8, 6\)"),
    "a first component of no dimension": (BF16_FIRST[0, 0], REST[0], r"is \(6,\).*, but its first component .* is \(\)"),
    "a first component in FP64": (
        BF16_FIRST.double(),
        REST,
        r"is \(8, 6\) torch.bfloat16, .* is \(8, 6\) torch.float64; a pair must be bfloat16",
    ),
    "a first component in FP16": (
        BF16_FIRST.half(),
        REST.to(torch.float8_e4m3fn),
        r"is \(8, 6\) torch.float8_e4m3fn, but .* torch.float16; a pair",
    ),
    "a remainder in FP32": (BF16_FIRST, REST.float(), r"is \(8, 6\) torch.float32, but its first component"),
    "a remainder of whole numbers": (BF16_FIRST, REST.long(), r"is \(8, 6\) torch.int64, but its first component"),
}


@pytest.mark.promise("Checkpoints", "A state, scale, group or second component that does not fit its weight is refused by name.")
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("first_key", "key"), [("model", "weight_remainder"), ("exp_avg_sq", "exp_avg_sq_remainder")])
def test_two_entries_that_are_no_pair(tmp_path: Path, first_key: str, key: str, name: str):
    first, rest, said = PAIRS[name]
    there = stored(tmp_path, [Item.whole(f"{first_key}/w", first), Item.whole(f"{key}/w", rest)])
    whole = place((0,) * first.dim(), tuple(first.shape), tuple(first.shape))
    with pytest.raises(ValueError, match=rf"{key}/w {said}.*: load an older checkpoint"):
        find_whole(there, first_key, [whole], first.shape, VOCABULARY)
    with pytest.raises(ValueError, match=rf"{key}/w {said}"):
        check_remainder(there, key, [whole])


@pytest.mark.parametrize("scaled", ["model/w", "weight_remainder/w"])
def test_a_pair_has_no_scale(tmp_path: Path, scaled: str):
    entries = [Item.whole("model/w", BF16_FIRST), Item.whole("weight_remainder/w", REST)]
    there = stored(tmp_path, [*entries, Item.whole(scale_key(scaled, (0, 0)), torch.tensor(2.0))])
    with pytest.raises(ValueError, match=f"{scaled} has a scale, which components of a pair must not have; load an older checkpoint"):
        check_remainder(there, "weight_remainder", [place((0, 0), (8, 6), (8, 6))])


def test_a_remainder_without_its_first_component(tmp_path: Path):
    there = stored(tmp_path, [Item.whole("exp_avg_sq_remainder/w", REST)])
    with pytest.raises(ValueError, match="it has no exp_avg_sq/w; load an older checkpoint"):
        check_remainder(there, "exp_avg_sq_remainder", [place((0, 0), (8, 6), (8, 6))])


@every_pair
@pytest.mark.parametrize("key", ["master", "exp_avg", "exp_avg_sq", "weight_remainder", "momentum"])
@pytest.mark.parametrize("name", ["w", EMBEDDING])
@pytest.mark.parametrize("shape", [(), (6,), (48,), (6, 8), (7, 6), (9, 6), (1, 8, 6)])
def test_a_state_of_another_shape_than_its_weight(tmp_path: Path, key: str, name: str, shape: tuple[int, ...]):
    """Also one that the model could take as a vocabulary that was padded otherwise."""
    there = stored(tmp_path, [Item.whole(f"model/{name}", torch.ones(8, 6)), Item.whole(f"{key}/{name}", torch.ones(shape))])
    said = rf"{key}/{name} is \({', '.join(map(str, shape))},?\), but its weight model/{name} is \(8, 6\); load an older checkpoint"
    for wanted in ((8, 6), shape):
        with pytest.raises(ValueError, match=said):
            find(there, key, [place((0,) * len(wanted), wanted, wanted, name=name)], wanted, VOCABULARY)
