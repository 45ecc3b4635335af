"""The published tables, against the rows read by hand."""

import csv

import pytest

from tools.docs import tables
from tools.docs.cells import Absent, Listing
from tools.docs.evidence import ROOT, read


@pytest.mark.parametrize("name", sorted(tables.TABLES))
def test_every_table_is_whole_and_names_its_source(name):
    table = tables.TABLES[name]()
    text = table.markdown()
    if isinstance(table, Listing):
        assert len(table.lines) >= 1
        assert text == "```text\n" + "\n".join(table.lines) + "\n```"
        return
    if isinstance(table, Absent):
        assert not (ROOT / table.file).exists()
        return
    assert table.cells
    assert {len(cells) for cells in table.cells} == {len(table.columns)}
    assert all(f"`{file}`" in text.replace("\n", " ") for file, _ in table.sources)
    assert table.sources or table.told in text.replace("\n", " ")


def test_a_peer_is_quoted_by_its_best_row_beside_the_one_of_the_same_run():
    with (ROOT / tables.STEP).open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["case"] == "megatron te-delayed" and row["preset"] == "1.3b"]
    best = min(float(row["ms"]) for row in rows)
    same = next(float(row["ms"]) for row in rows if row["commit"] == tables.RUN)
    line = next(cells for cells in tables.summary().cells if cells[0] == tables.PEERS["megatron te-delayed"])
    assert line[1:3] == [f"{same:.0f}", f"{best:.0f}"]
    assert best < same


def test_utilisation_is_that_of_both_peaks():
    assert tables.mfu({"tflops": "494.5"}) == "50 % / 25 %"


def test_a_run_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"step\.csv has no row for a published table"):
        tables.steps("nothing")


def test_counted_rows_of_table_7_name_their_commit_and_computed_ones_stand_apart():
    assert {row["source"] for row in tables.table7().sources[0][1]} == {"computed"}
    counted = tables.table7_measured().sources[0][1]
    assert all(len(row["commit"]) == 7 and row["date"].startswith("20") for row in counted)
    assert len(counted) + len(tables.table7().sources[0][1]) == len(read(tables.COMPUTED[0]))


def test_a_layer_stands_in_both_precisions_with_its_gain():
    table = tables.in_both("linear")
    layer, fp8, bf16, *_, gain = table.cells[0]
    assert (layer, gain) == ("2048 x 2048", f"{float(bf16) / float(fp8):.2f}")
    assert {row["kernel"] for row in table.sources[0][1]} >= {f"FP8 linear, {layer}", f"BF16 linear, {layer}"}


def test_saved_activations_are_the_measured_ones_largest_first():
    table = tables.saved_activations()
    layers = [float(cells[-1]) for cells in table.cells]
    assert layers == sorted(layers, reverse=True)
    row = next(row for row in read(tables.MEMORY) if (row["case"], row["what"]) == ("bf16", "activations, layer"))
    assert table.cells[0][0] == "`bf16`"
    assert table.cells[0][-1] == f"{float(row['measured']):.1f}"
