"""Tables of long sequences: a case without the shape, its length, and the ratio to the fastest BF16 of the same length by hand."""

import pytest

from tools.docs import long_sequences
from tools.docs.cells import pick


def test_a_case_is_shown_without_the_shape_of_the_model():
    shape = "--num-layers 8 --micro-batch-size 1 --seq-length 32768 --fp8-amax-history-len 2"
    row = {"case": f"O3 {shape} --context-parallel-size 2 --attention-precision fp8"}
    assert long_sequences.tokens(row) == 32768
    assert long_sequences.flags(row) == "`O3 --context-parallel-size 2 --attention-precision fp8`"


def test_a_ratio_is_to_the_fastest_bf16_of_the_same_length_over_the_same_link():
    table = long_sequences.steps()
    ((_, rows),) = table.sources
    where, ratios = table.columns.index("times the fastest BF16"), {}
    for row, cells in zip(rows, table.cells, strict=True):
        place = (long_sequences.tokens(row), row["p2p"] == "off")
        ratios.setdefault(place, []).append((row["level"], float(cells[where]), float(row["tokens_s_gpu"])))
    assert list(ratios) == sorted(ratios)
    for found in ratios.values():
        fastest = max(speed for level, _, speed in found if level == "O0")
        assert [ratio for _, ratio, _ in found] == pytest.approx([speed / fastest for *_, speed in found], abs=0.005)
        assert max(ratio for level, ratio, _ in found if level == "O0") == 1.0


def test_attention_shows_each_case_once_and_nothing_that_failed():
    table = long_sequences.attention()
    assert len({tuple(cells[:3]) for cells in table.cells}) == len(table.cells)
    assert not any(row["error"] for row in pick(long_sequences.CONTEXT))


def test_of_a_case_that_ran_twice_the_newest_is_shown():
    rows = [{"case": "a", "ms": "1"}, {"case": "b", "ms": "2"}, {"case": "a", "ms": "3"}]
    assert long_sequences.newest(rows, lambda row: (row["case"],)) == [rows[2], rows[1]]
