"""Student's t against the printed table, the interval by hand, and the verdicts."""

import math

import pytest

from megatron.lm.evaluation.paired_difference import (
    DOES_NOT_HOLD,
    EFFECT,
    HOLDS,
    TOO_SMALL,
    Interval,
    PairedDifference,
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


@pytest.mark.parametrize("probability", [0.5, 0.6, 0.9, 0.975, 0.9995])
def test_one_and_two_degrees_have_a_closed_form(probability):
    assert student_t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-10, abs=1e-10)
    two = (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability)))
    assert student_t_quantile(probability, 2) == pytest.approx(two, rel=1e-10, abs=1e-10)


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


def of(mean, half_width):
    relative = Interval(mean=mean, half_width=half_width)
    return PairedDifference(absolute=relative, relative=relative, seeds=(1, 2, 3))


@pytest.mark.parametrize(
    ("mean", "half_width", "verdict"),
    [
        (0.001, 0.004, HOLDS),
        (-0.002, 0.001, HOLDS),
        (0.0, 0.011, TOO_SMALL),
        (0.004, 0.003, TOO_SMALL),
        (0.008, 0.003, TOO_SMALL),
        (0.02, 0.005, DOES_NOT_HOLD),
        (-0.02, 0.005, DOES_NOT_HOLD),
        (0.0, None, TOO_SMALL),
        (0.5, None, TOO_SMALL),
        (math.nan, math.nan, DOES_NOT_HOLD),
        (math.inf, math.nan, DOES_NOT_HOLD),
    ],
)
def test_verdicts(mean, half_width, verdict):
    assert of(mean, half_width).verdict() == verdict


def test_an_interval_that_reaches_beyond_the_effect_never_holds():
    assert of(0.0, EFFECT).verdict() == HOLDS
    assert of(0.0, 1.01 * EFFECT).verdict() == TOO_SMALL
    assert of(0.0, 1.01 * EFFECT).verdict(effect=0.02) == HOLDS
    with pytest.raises(ValueError, match="0 or more"):
        of(0.0, 0.1).verdict(effect=-0.1)


def test_the_sentence_states_difference_interval_seeds_and_verdict():
    told = paired_difference({1: 5.0, 2: 5.0, 3: 5.0}, {1: 5.01, 2: 5.02, 3: 5.03}).sentence("bf16", "O3")
    assert told == (
        "O3 against bf16: +0.0200 nats per token, +0.40 % (95 % interval -0.10 to +0.90 %), 3 seeds: "
        "too small to say whether they differ by 0.6 %"
    )
    assert "+0.0100 nats per byte, " in paired_difference({1: 5.0}, {1: 5.01}).sentence("bf16", "O3", unit="nats per byte")
    one = paired_difference({1: 5.0}, {1: 5.01}).sentence("bf16", "O3")
    assert one == "O3 against bf16: +0.0100 nats per token, +0.20 %, one seed, no interval: too small to say"
    assert "the losses are equal within 0.6 %" in of(0.0, 0.001).sentence("a", "b")
    assert "the losses differ by more than 0.6 %" in of(0.02, 0.001).sentence("a", "b")
    assert "non-finite" in paired_difference({1: 5.0, 2: 5.0}, {1: 5.01, 2: math.nan}).sentence("bf16", "O3")
