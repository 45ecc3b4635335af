"""Where local tensors stand in the whole model, on one process; that the ranks of a grid have all of it is in test_resharding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import tiny
from megatron.lm.checkpoint.place import Place, names_of, places

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "swiglu": {"swiglu": True, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2},
    "untied": {"untie_embeddings_and_output_weights": True, "normalization": "RMSNorm", "position_embedding_type": "learned_absolute"},
}


def rows_of(start: int, count: int, offset: int = 100) -> Place:
    """Local rows `start` to `start + count` of a tensor of 4 columns that stand from row `offset` on."""
    return Place(name="w", shape=(200, 8), offset=(offset, 4), start=start, sizes=(count, 4), first=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (None, (slice(10, 16), (100, 4))),
        (slice(0, 64), (slice(10, 16), (100, 4))),
        (slice(10, 16), (slice(0, 6), (100, 4))),
        (slice(12, 64), (slice(0, 4), (102, 4))),  # counted from the first of the rows
        (slice(8, 13), (slice(2, 5), (100, 4))),
        (slice(12, 14), (slice(0, 2), (102, 4))),
        (slice(0, 10), None),
        (slice(16, 20), None),
    ],
    ids=str,
)
def test_rows_within_a_place(rows: slice | None, expected: tuple[slice, tuple[int, ...]] | None):
    assert rows_of(10, 6).within(rows) == expected


def test_a_scalar_is_within_its_place():
    place = Place(name="seen", shape=(), offset=(), start=0, sizes=(), first=True)
    assert place.within(None) == (None, ())


def test_pieces_of_a_tensor_in_two_places_stand_where_the_whole_does():
    """Whichever way an owner's rows lie over the halves of SwiGLU's first layer, each row goes where it would have gone in one piece."""
    gate, half = rows_of(0, 6, offset=20), rows_of(6, 6, offset=120)

    def stands(rows: slice) -> dict[int, int]:
        found = [(place.within(rows), place) for place in (gate, half)]
        return {
            rows.start + part[0].start + i: part[1][0] + i
            for part, _ in found
            if part is not None and part[0] is not None
            for i in range(part[0].stop - part[0].start)
        }

    whole = stands(slice(0, 12))
    assert whole == {i: 20 + i for i in range(6)} | {i: 114 + i for i in range(6, 12)}
    for cut in (3, 6, 9):
        assert stands(slice(0, cut)) | stands(slice(cut, 12)) == whole


@pytest.mark.parametrize("shape", SHAPES)
def test_one_process_has_everything(prefix: Path, shape: str):
    with tiny.trainer(tiny.config(prefix, opt_level="O3", **SHAPES[shape])) as made:
        model, where = made.training.model, places(made.training.model)
        held = {name: x for name, x in model.state_dict().items() if not name.endswith("_extra_state")}
    assert where.keys() == held.keys()
    for name, parts in where.items():
        assert all((part.name, part.shape, part.first) == (name, tuple(held[name].shape), True) for part in parts)
        if len(parts) == 1:
            assert (parts[0].offset, parts[0].start, parts[0].sizes) == ((0,) * held[name].dim(), 0, tuple(held[name].shape))
    cut = {name for name, parts in where.items() if len(parts) > 1}
    swiglu = shape == "swiglu"
    assert cut == {name for name in held if swiglu and "linear_fc1" in name and name.endswith((".weight", ".bias"))}
    for name in cut:  # the gate and the linear half
        half = held[name].shape[0] // 2
        assert [(part.start, part.offset[0], part.sizes[0]) for part in where[name]] == [(0, 0, half), (half, half, half)]


def test_names_are_those_of_the_parameters():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    names = names_of(model)
    assert names[model[1].bias] == "1.bias"
    assert list(names.values()) == [name for name, _ in model.named_parameters()]
    assert torch.equal(model.get_parameter(names[model[0].weight]), model[0].weight)
