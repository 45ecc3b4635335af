"""Measured grids: sizes with context parallelism, and cards of both kinds."""

import math

from tools.docs import grids
from tools.docs.cells import pick


def test_the_product_of_the_sizes_is_the_number_of_cards():
    rows = pick(grids.GRID)
    assert any(grids.shape(row).split(" x ")[1] == "2" for row in rows)
    for row in rows:
        assert math.prod(map(int, grids.shape(row).split(" x "))) == int(row["gpus"]), row["case"]


def test_a_line_names_its_cards_and_its_tree():
    table, rows = grids.grid(), pick(grids.GRID)
    place = {name: n for n, name in enumerate(table.columns)}
    assert {line[place["cards"]].split(" x ")[1] for line in table.cells} == {"H100", "H200"}
    assert [line[place["commit"]] for line in table.cells] == [row["commit"] for row in rows]
