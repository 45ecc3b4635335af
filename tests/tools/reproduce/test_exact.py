"""Tables that follow from definitions, against the papers' digits and a few numbers by hand."""

from pathlib import Path

import pytest

from msamp.numerics import formats
from tools.reproduce import exact
from tools.reproduce.entry import Task

TASK = Task("toy", "whole", Path("text"), Path("folder"))


def by_quantity(run):
    return {finding.quantity: finding for finding in run(TASK)}


def test_every_preset_is_the_papers():
    found = by_quantity(exact.table1)
    assert found["settings that differ"].ours == 0
    assert (found["175b: TP"].ours, found["175b: PP"].ours, found["13b: learning rate"].ours) == (8, 4, 3e-4)


def test_ranges_and_errors_come_out_to_the_printed_digits():
    found = by_quantity(exact.table9)
    assert all(finding.ours == pytest.approx(finding.paper, rel=6e-3) for finding in found.values() if finding.paper)
    # By hand: 448 and 416 are the two largest codes of E4M3; 1 and 9/8 of 2^-6 the two smallest normal ones.
    assert found["fp8-e4m3: error at the largest"].ours == pytest.approx(32 / 416)
    assert found["fp8-e4m3: error at the smallest normal"].ours == pytest.approx(1 / 9)


@pytest.mark.parametrize(("fmt", "codes"), [(formats.E4M3, 126), (formats.E5M2, 123), (formats.FP16, 31743), (formats.BF16, 32639)])
def test_every_code_is_walked(fmt, codes):
    found = exact.positive_codes(fmt)
    assert len(found) == codes
    values = [value for _, value in found]
    assert values == sorted(set(values))
    assert (values[0], values[-1], min(value for normal, value in found if normal)) == (fmt.smallest, fmt.max, fmt.tiny)


def test_pairs_and_bytes_of_collage():
    first = by_quantity(exact.collage_table1)
    assert first["beta2 0.99, first component"].ours == 0.98828125  # BF16's neighbours are 0.98828125 and 0.9921875: the paper misprints
    assert {name: finding.ours for name, finding in by_quantity(exact.collage_table2).items()} == {
        "option a": 8, "option light": 10, "option plus": 12, "option d": 16,
    }  # fmt: skip
