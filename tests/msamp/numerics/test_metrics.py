import math

import pytest
import torch

from helpers.numerics import floats, golden
from msamp.numerics.formats import E4M3
from msamp.numerics.metrics import TALLY, add_tallies, judge, saturation_frac, sqnr_db, underflow_frac
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
