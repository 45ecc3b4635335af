"""Cells and tables as Markdown."""

import pytest

from tools.docs import cells
from tools.docs.cells import Sentence


def test_a_row_on_no_known_tree_is_marked():
    columns = {"case": cells.column("case"), "ms": cells.column("ms", 0)}
    rows = [{"case": "a", "ms": "1.6", "commit": "0123456"}, {"case": "b", "ms": "", "commit": "0123456+"}]
    table = cells.of("x.csv", rows, columns)
    assert table.cells == [["a", "2"], ["b" + cells.MARK, ""]]
    assert "Measured on a tree that is not in the history" in table.markdown()


def test_a_sentence_names_where_its_numbers_were_measured():
    rows = [{"commit": "0123456", "gpu": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-25"}]
    text = Sentence("It costs 3 %.", [("x.csv", rows)]).markdown()
    assert text == "It costs 3 %. `x.csv`, commit 0123456, NVIDIA H200, 2.11.0, 2026-11-25."


def test_a_peer_has_its_name_and_ours_its_flags():
    assert [cells.case({"case": case}) for case in ("torchao bf16", "O3 --tp-wire fp8")] == ["torch.compile, BF16", "`O3 --tp-wire fp8`"]


def test_rows_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"step\.csv has no row for a published table"):
        cells.pick(f"{cells.BENCH}/step.csv", lambda row: False)


def test_of_rows_alike_the_last_is_kept_in_its_place():
    rows = [{"case": "a", "ms": "1"}, {"case": "b", "ms": "2"}, {"case": "a", "ms": "3"}, {"case": "c", "ms": "4"}]
    assert [row["ms"] for row in cells.newest(rows, "case")] == ["2", "3", "4"]
    assert cells.newest(rows, "case", "ms") == rows
