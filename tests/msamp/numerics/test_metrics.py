import math

import pytest
import torch

from helpers.numerics import floats, golden, undelivered_frac
from msamp.numerics.formats import E4M3
from msamp.numerics.metrics import TALLY, add_tallies, edq, judge, lost_frac, saturation_frac, sqnr_db, undelivered_share, underflow_frac
from msamp.numerics.quantize import dequantize, quantize


def test_golden_metrics():
    vectors = golden("metrics")
    x = floats(vectors["x"])
    payload = quantize(x, vectors["scale"], E4M3)
    back = dequantize(payload, 1 / vectors["scale"])
    assert sqnr_db(x, back) == pytest.approx(vectors["sqnr_db"], rel=1e-6)
    assert underflow_frac(x, back) == pytest.approx(vectors["underflow_frac"], rel=1e-6)
    assert saturation_frac(payload, E4M3) == pytest.approx(vectors["saturation_frac"], rel=1e-6)


def test_underflow_counts_only_what_was_not_zero():
    x = torch.tensor([0.0, 0.0, 1e-9, 1.0])
    assert underflow_frac(x, torch.tensor([0.0, 0.0, 0.0, 1.0])) == 0.5
    assert underflow_frac(torch.zeros(3), torch.zeros(3)) == 0.0


def test_tallies_of_parts_add_up_and_are_judged():
    a, b = ([float(x) for x in row] for row in ((10, 8, 2, 1, 100, 1, 3, 4), (30, 12, 0, 0, 0, 0, 7, 2)))
    assert dict(zip(TALLY, add_tallies(a, b), strict=True)) == {
        "elements": 40, "nonzero": 20, "vanished": 2, "saturated": 1, "signal": 100, "noise": 1, "amax": 7, "scale": 2
    }  # fmt: skip
    assert judge(add_tallies(a, b)) == pytest.approx({"amax": 7, "underflow": 0.1, "saturation": 0.025, "sqnr_db": 20.0, "scale": 2})
    assert math.isnan(add_tallies(a, [*b[:6], math.nan, 1.0])[6])
    assert judge([0.0] * 8)["sqnr_db"] == math.inf


def test_golden_descent():
    vectors = golden("metrics")
    update, effective = (torch.tensor([float(v) for v in vectors[k]], dtype=torch.float64) for k in ("update", "effective"))
    assert edq(update, effective) == pytest.approx(vectors["edq"], rel=1e-6)
    assert lost_frac(update, effective) == pytest.approx(vectors["lost_frac"], rel=1e-6)


def test_edq_of_a_perfect_and_of_a_lost_update():
    update = torch.tensor([3.0, 4.0])
    assert edq(update, update) == pytest.approx(5.0)
    assert edq(update, torch.zeros(2)) == 0.0
    assert edq(update, torch.tensor([3.0, 0.0])) == pytest.approx(9 / 5)  # along the update, not the change
    assert edq(torch.zeros(2), update) == edq(torch.zeros(2), torch.zeros(2)) == 0.0  # no direction: not 0 / 0
    assert lost_frac(update, torch.tensor([3.0, 0.0])) == 0.5
    assert lost_frac(torch.zeros(2), torch.zeros(2)) == 0.0


def test_undelivered_is_a_share_of_the_distance_and_not_of_the_elements():
    update = torch.tensor([3.0, -1.0, 0.0])
    assert undelivered_frac(update, update) == 0.0
    assert undelivered_frac(update, torch.tensor([3.0, 0.0, 7.0])) == 0.25  # an element that nothing was to move does not count
    assert undelivered_frac(update, torch.tensor([0.0, -1.0, 0.0])) == 0.75
    assert undelivered_frac(update, 2 * update) == 0.0  # no more than everything arrives
    assert undelivered_frac(update, -update) == 1.0
    assert undelivered_frac(torch.zeros(2), torch.ones(2)) == 0.0
    assert math.isnan(undelivered_share(math.nan, 1.0))
    assert math.isnan(undelivered_share(1.0, math.nan))


def test_of_a_stochastically_rounded_update_most_elements_stay_and_all_of_it_arrives():
    update, code = torch.full((2**16,), 0.02), 1.0
    draw = torch.rand(update.shape, generator=torch.Generator().manual_seed(3))
    rounded = torch.where(draw < update / code, code, 0.0)
    assert lost_frac(update, rounded) > 0.95
    assert undelivered_frac(update, rounded) < 0.05
    assert undelivered_frac(update, torch.zeros_like(update)) == 1.0
