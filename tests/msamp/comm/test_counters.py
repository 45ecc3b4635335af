"""Bytes on the wire: the formulas by hand, and counting."""

import pytest

from msamp.comm.counters import WireBytes, all_gather_sent, all_reduce_sent, all_to_all_sent


def test_what_a_rank_keeps_is_not_sent():
    assert [all_to_all_sent([10, 0, 3], rank) for rank in range(3)] == [3, 13, 10]
    assert all_gather_sent(100, 4) == 300


@pytest.mark.parametrize(("total", "ranks", "sent"), [(8, 4, 12), (9, 4, 14), (4, 3, 6), (5, 2, 5), (0, 8, 0)])
def test_a_ring_all_reduce_sends_two_of_n_minus_one_nths(total, ranks, sent):
    assert all_reduce_sent(total, ranks) == sent


def test_one_rank_sends_nothing():
    assert all_to_all_sent([7], 0) == all_gather_sent(7, 1) == all_reduce_sent(7, 1) == 0


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


def test_an_unknown_kind_is_refused():
    wire = WireBytes()
    for count in (lambda: wire.add("gradient", "all-to-all", 1), lambda: wire.total("gradient")):
        with pytest.raises(ValueError, match="'gradient' is unknown; choose one of weight, activation"):
            count()
