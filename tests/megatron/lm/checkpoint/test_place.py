"""Where local tensors stand in the whole model, on one process; that the ranks of a grid have all of it is in test_resharding."""

import pytest

from megatron.lm.checkpoint.place import Place


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
