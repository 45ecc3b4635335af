"""The tables of gradients summed over ranks, against their rows."""

import csv
import statistics

from tools.docs import gradient_sums
from tools.docs.evidence import ROOT
from tools.reproduce.sum_orders import CHAIN, ORDERS, TREE


def test_means_over_ranks_are_those_of_the_chain():
    table = gradient_sums.over_ranks()
    with (ROOT / gradient_sums.FIG7).open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if (row["dp"], row["strategy"], row["order"]) == ("128", "pre", CHAIN)]
    assert table.cells[0][:2] == ["pre", f"{statistics.fmean(float(row['snr_db']) for row in rows):.1f}"]


def test_every_order_has_a_column_and_the_sum_in_fp32_has_none_but_the_first():
    table = gradient_sums.by_order()
    assert table.columns[1:] == list(ORDERS)
    by_name = {cells[0].split()[0]: cells[1:] for cells in table.cells}
    assert by_name["fp32-sum"][1:] == ["", ""]
    tree = list(ORDERS).index(TREE)
    assert float(by_name["pre"][tree]) > float(by_name["pre"][0]) + 10  # what a chain loses, a tree keeps
    assert float(by_name["post"][tree]) < float(by_name["post"][0]) + 2  # saturated in every order
