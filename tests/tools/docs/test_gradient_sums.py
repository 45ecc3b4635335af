"""The tables of gradients summed over ranks, against their rows."""

import csv
import statistics

from tools.docs import gradient_sums
from tools.docs.evidence import ROOT
from tools.reproduce.sum_orders import CHAIN


def test_means_over_ranks_are_those_of_the_chain():
    table = gradient_sums.over_ranks()
    with (ROOT / gradient_sums.FIG7).open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if (row["dp"], row["strategy"], row["order"]) == ("128", "pre", CHAIN)]
    assert table.cells[0][:2] == ["pre", f"{statistics.fmean(float(row['snr_db']) for row in rows):.1f}"]
