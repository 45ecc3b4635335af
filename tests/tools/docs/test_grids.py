"""Measured grids: sizes with context parallelism, and cards of both kinds."""

import math

from tools.docs import grids
from tools.docs.cells import pick


def test_the_product_of_the_sizes_is_the_number_of_cards():
    rows = pick(grids.GRID)
    assert any(grids.shape(row).split(" x ")[1] == "2" for row in rows)
    for row in rows:
        assert math.prod(map(int, grids.shape(row).split(" x "))) == int(row["gpus"]), row["case"]


def test_a_case_that_was_measured_again_has_its_last_row_only():
    rows = pick(grids.GRID)
    kept = grids.last_of_each()
    again = [row for row in rows if row["case"] == "O3 --tensor-model-parallel-size 2 --sequence-parallel" and row["preset"] == "1.3b"]
    here = [row for row in again if row["gpu"] == "NVIDIA H200" and row["gpus"] == "2" and row["micro_batch"] == "8"]
    assert len(here) > 1
    assert [row in kept for row in here] == [False] * (len(here) - 1) + [True]


def test_a_line_names_its_cards_and_its_tree():
    table, rows = grids.grid(), grids.last_of_each()
    place = {name: n for n, name in enumerate(table.columns)}
    assert {line[place["cards"]].split(" x ")[1].split(",")[0] for line in table.cells} == {"H100", "H200"}
    without = [line for line, row in zip(table.cells, rows, strict=True) if row["p2p"] == "off"]
    assert without
    assert all(line[place["cards"]].endswith(", NCCL through host memory") for line in without)
    assert [line[place["commit"]] for line in table.cells] == [row["commit"] for row in rows]
