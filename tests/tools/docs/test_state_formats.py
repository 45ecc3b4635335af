"""The tables of which share of an update arrives."""

import pytest

from msamp.numerics.formats import COAT_E4M3, E4M3, FP16
from tools.docs import state_formats
from tools.docs.state_formats import BINADES, NEAREST, STOCHASTIC


def test_nearest_first_moments_stall_and_stochastic_ones_do_not():
    nearest, stochastic = (state_formats.moment_shares(E4M3, FP16, rounding, (0.9, 0.95)) for rounding in (NEAREST, STOCHASTIC))
    assert nearest[:10] == pytest.approx([0.77] * 10, abs=0.02)
    assert stochastic[:10] == pytest.approx([1.0] * 10, abs=0.01)
    assert max(nearest[-10], stochastic[-10]) < 0.1  # below the formats' range


def test_groups_with_expansion_reach_every_binade():
    shares = state_formats.moment_shares(COAT_E4M3, COAT_E4M3, NEAREST, (0.9, 0.95))
    assert state_formats.smallest_delivered(shares) == BINADES - 1


@pytest.mark.parametrize(("shares", "last"), [((1.0, 0.9, 0.8, 1.0), 1), ((0.8, 1.0), None), ((1.0, 1.0), 1)])
def test_the_last_binade_that_arrives_is_before_the_first_loss(shares, last):
    assert state_formats.smallest_delivered(shares) == last


def test_a_master_takes_a_part_of_a_code_with_stochastic_rounding_alone():
    assert state_formats.master_share(FP16, 8, NEAREST) == 0.0
    assert state_formats.master_share(FP16, 8, STOCHASTIC) == pytest.approx(1.0, abs=0.02)
