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
    row = next(row for row in reversed(read(tables.MEMORY)) if (row["case"], row["what"]) == ("O0", "activations, layer"))
    assert table.cells[0][0] == "`O0`"
    assert table.cells[0][-1] == f"{float(row['measured']):.1f}"


def test_one_precision_of_two_trees_is_one_line():
    """`bf16` is O0, and a trial of FP8 GEMMs changes nothing in it: only the newest of such rows is published."""
    assert tables.same_case("bf16") == tables.same_case("O0") == ("O0",)
    assert tables.same_case("O0", "7b --fp8-min-gain 0") == tables.same_case("O0 --fp8-min-gain 0", "7b") == tables.same_case("bf16", "7b")
    assert tables.same_case("O3", "7b --fp8-min-gain 0") != tables.same_case("O3", "7b")
    cells = tables.memory().cells
    assert not any(line[0] == "`bf16`" for line in cells)
    assert sum(line[:3] == ["`O0`", "compute", "peak"] for line in cells) == 1
    assert len({(line[0], line[1]) for line in tables.saved_activations().cells}) == len(tables.saved_activations().cells)
    of_7b = [line for line in tables.larger_steps().cells if line[0] == "`O0`" and line[1].split()[0] == "7b" and line[2] == "2"]
    newest = [row for row in read(tables.STEP) if row["case"] == "O0" and row["preset"].split()[0] == "7b" and row["micro_batch"] == "2"][
        -1
    ]
    assert [line[3] for line in of_7b] == [f"{float(newest['ms']):.1f}"]


def test_a_table_with_an_older_o0_says_what_it_takes_today():
    o0 = [row for row in read(tables.STEP) if tables.whole_step(row) and row["case"] == "O0"]
    told = f"since {o0[-1]['commit']} its step of GPT-1.3B takes {float(o0[-1]['ms']):.0f} ms"
    for name in ("steps", "peer-steps", "h100-steps", "data-parallel", "data-parallel-best", "precisions", "coat-parts", "grids"):
        assert told in tables.TABLES[name]().note, name
    assert tables.newer_o0([o0[-1]]) == ""
    assert tables.newer_o0([row for row in read(tables.STEP) if row["case"] == "O3"]) == ""


def test_coats_memory_is_told_by_the_newest_steps_alone():
    cells = tables.coat_memory().cells
    at_four = [line for line in cells if line[1] == "4"]
    assert [line[0] for line in at_four] == ["`bf16`", "`O3`", "`coat`"]
    row = next(row for row in reversed(read(tables.STEP)) if row["case"] == "bf16" and row["preset"] == "1.3b --fp8-min-gain 0")
    assert at_four[0][2] == f"{float(row['ms']):.0f}"
    assert {line[-1] for line in at_four} == {row["commit"]}
    assert "are of the slower BF16" in tables.coat_memory().note


def test_losses_of_precisions_have_an_interval_or_say_that_they_have_none():
    by_name = {line[0].split("`")[1]: line for line in tables.precisions().cells}
    assert "(one seed)" in by_name["bf16-kahan"][3]
    low, high = by_name["O3"][3].partition("(")[2].rstrip(")").split(" to ")
    assert float(low) < 0 < float(high)
