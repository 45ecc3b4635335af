"""Student's t against the printed table, the interval by hand, and the verdicts."""

import math

import pytest

from megatron.lm.evaluation.paired_difference import (
    ABOVE,
    BELOW,
    HOLDS,
    MARGIN,
    NOT_SHOWN,
    RELATIVE_MARGIN,
    Interval,
    PairedDifference,
    cost_in_tokens,
    interval,
    paired_difference,
    student_t_quantile,
)

# Abramowitz and Stegun, table 26.10: the two-sided 95 % points, then the 99 % points.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 9: 2.262, 11: 2.201, 30: 2.042, 120: 1.980}
TABLE_99 = {1: 63.657, 2: 9.925, 7: 3.499, 30: 2.750}


def test_quantiles_are_those_of_the_table():
    for probability, table in ((0.975, TABLE), (0.995, TABLE_99)):
        for degrees, t in table.items():
            assert student_t_quantile(probability, degrees) == pytest.approx(t, abs=5.1e-4)


@pytest.mark.parametrize(("probability", "degrees"), [(0.4, 3), (1.0, 3), (math.nan, 3), (0.975, 0)])
def test_quantiles_that_do_not_exist_are_refused(probability, degrees):
    with pytest.raises(ValueError, match="give"):
        student_t_quantile(probability, degrees)


def test_the_interval_by_hand():
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert interval([1.0]) == Interval(mean=1.0, half_width=None)
    assert interval([1.0]).ends == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="at least one difference"):
        interval([])


def test_runs_are_paired_by_seed_and_not_by_order():
    found = paired_difference({1: 4.0, 2: 5.0, 3: 6.0}, {2: 5.5, 1: 4.4})
    assert found.seeds == (2, 1)
    assert found.absolute.mean == pytest.approx(0.45)
    assert found.relative.mean == pytest.approx(0.1)
    assert found.relative.half_width == pytest.approx(0.0, abs=1e-12)


def test_unpaired_runs_are_refused():
    with pytest.raises(ValueError, match=r"seed 3 has no baseline run \(seeds: 1, 2"):
        paired_difference({1: 4.0, 2: 5.0}, {3: 4.0})
    with pytest.raises(ValueError, match="no run to compare"):
        paired_difference({1: 4.0}, {})
    with pytest.raises(ValueError, match="seed 1 is 0"):
        paired_difference({1: 0.0}, {1: 1.0})


def of(mean, half_width, unit="nats per token"):
    some = Interval(mean=mean, half_width=half_width)
    return PairedDifference(absolute=some, relative=some, seeds=(1, 2, 3), unit=unit)


@pytest.mark.parametrize(
    ("mean", "half_width", "verdict"),
    [
        (0.001, 0.004, HOLDS),
        (-0.002, 0.001, HOLDS),  # holds, although equal losses are excluded
        (0.0, 0.011, NOT_SHOWN),
        (0.006, 0.007, NOT_SHOWN),
        (0.008, 0.003, ABOVE),  # partly within the margin
        (0.02, 0.005, ABOVE),
        (-0.02, 0.005, BELOW),
        (0.0, None, NOT_SHOWN),  # one seed never shows anything
        (0.5, None, NOT_SHOWN),
        (math.nan, math.nan, ABOVE),
        (math.inf, math.nan, ABOVE),
    ],
)
def test_verdicts(mean, half_width, verdict):
    assert of(mean, half_width).verdict() == verdict


def test_the_margin_is_a_hundredth_of_a_nat_and_a_fifth_of_a_percent_in_other_units():
    assert (MARGIN, RELATIVE_MARGIN) == (0.01, 0.002)
    assert [of(0.0, width).verdict() for width in (0.01, 0.0101)] == [HOLDS, NOT_SHOWN]
    assert [of(0.0, width, "nats per byte").verdict() for width in (0.002, 0.0021)] == [HOLDS, NOT_SHOWN]
    assert of(0.0, 0.0101).verdict(max_relative=0.02) == HOLDS
    with pytest.raises(ValueError, match="0 or more"):
        of(0.0, 0.1).verdict(max_relative=-0.1)


def test_the_cost_in_tokens_follows_the_last_quarter():
    curve = [(0, 9.0), (50, 5.0), (75, 4.0), (100, 3.5), (75, 4.2), (100, 3.7)]  # two seeds: 0.02 per token at the end
    assert cost_in_tokens(0.1, curve) == pytest.approx(0.05)
    assert cost_in_tokens(-0.1, curve) == pytest.approx(0.05)
    assert cost_in_tokens(0.1, []) is cost_in_tokens(0.1, [(1, 2.0)]) is cost_in_tokens(0.1, [(75, 3.0), (100, 3.0)]) is None


def test_the_sentence_states_difference_interval_seeds_cost_and_verdict():
    base = {1: 5.0, 2: 5.0, 3: 5.0}
    told = paired_difference(base, {1: 5.01, 2: 5.02, 3: 4.99}).sentence("bf16", "O3", curve=[(75, 6.0), (100, 5.0)])
    assert told == (
        "O3 against bf16: +0.0067 nats per token, +0.13 % (95 % interval -0.63 to +0.89 %), which bf16 covers in 0.2 % of its tokens, "
        "2 of 3 seeds above: not shown within 0.01 nats per token"
    )
    assert (
        paired_difference(base, {1: 5.01, 2: 5.02, 3: 5.03}).sentence("bf16", "O3").endswith("above: not shown within 0.01 nats per token")
    )
    assert paired_difference(base, {1: 5.04, 2: 5.05, 3: 5.06}).sentence("bf16", "O3").endswith("above by 0.0252 to 0.0748 nats per token")
    near = paired_difference(base, {1: 4.991, 2: 4.992, 3: 4.993}, unit="nats per byte").sentence("bf16", "O3", max_relative=0.01)
    assert "-0.0080 nats per byte, -0.16 % (95 % interval -0.21 to -0.11 %), 0 of 3 seeds above: holds within 1 %" in near
    assert near.endswith(", although the interval excludes equal losses")
    one = paired_difference({1: 5.0}, {1: 5.01}).sentence("bf16", "O3")
    assert one == "O3 against bf16: +0.0100 nats per token, +0.20 %, one seed, no interval: not shown"
    assert "non-finite" in paired_difference({1: 5.0, 2: 5.0}, {1: 5.01, 2: math.nan}).sentence("bf16", "O3")
