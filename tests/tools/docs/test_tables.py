"""The published tables, against the rows read by hand."""

import pytest

from tools.docs import grids, records, tables
from tools.docs.evidence import read


def test_utilisation_is_that_of_both_peaks():
    assert tables.mfu({"tflops": "494.5"}) == "50 % / 25 %"


def test_a_run_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"step\.csv has no row for a published table"):
        tables.steps("nothing")


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
    since = next(row for row in o0 if row["commit"] == "2c95adf")  # torch's rotation of queries and keys became one kernel
    told = f"since 2c95adf its step of GPT-1.3B takes {float(since['ms']):.0f} ms"
    names = ("steps", "peer-steps", "h100-steps", "data-parallel", "data-parallel-best", "precisions", "coat-parts", "grids", "records")
    for name in names:
        assert told in (tables.TABLES | grids.TABLES | records.TABLES)[name]().note, name
    assert tables.newer_o0([o0[-1]]) == ""
    assert tables.newer_o0([row for row in read(tables.STEP) if row["case"] == "O3"]) == ""
