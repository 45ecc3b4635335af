"""Bytes on the wire: the formulas by hand, and counting."""

import pytest

from msamp.comm.counters import WireBytes, all_reduce_sent


@pytest.mark.parametrize(("total", "ranks", "sent"), [(8, 4, 12), (9, 4, 14), (4, 3, 6), (5, 2, 5), (0, 8, 0)])
def test_a_ring_all_reduce_sends_two_of_n_minus_one_nths(total, ranks, sent):
    assert all_reduce_sent(total, ranks) == sent


def test_counting_and_taking():
    wire = WireBytes()
    wire.add("weight", "grad all-to-all", 10)
    wire.add("weight", "weight all-gather", 5)
    wire.add("activation", "all-gather", 7)
    wire.add("weight", "grad all-to-all", 1)
    counted = {("weight", "grad all-to-all"): 11, ("weight", "weight all-gather"): 5, ("activation", "all-gather"): 7}
    assert wire.rows() == counted
    assert (wire.total("weight"), wire.total("activation")) == (16, 7)
    assert wire.take() == counted
    assert wire.rows() == {}
    assert wire.total("weight") == 0
