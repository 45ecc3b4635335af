import math

import pytest
import torch
from numerics import floats, golden, make

from msamp.numerics import metrics
from msamp.numerics.formats import E4M3
from msamp.numerics.metrics import TALLY, add_tallies, edq, judge, lost_frac, saturation_frac, sqnr_db, tally_, underflow_frac
from msamp.numerics.quantize import dequantize, quantize


def test_golden_metrics():
    vectors = golden("metrics")
    x = floats(vectors["x"])
    payload = quantize(x, vectors["scale"], E4M3)
    back = dequantize(payload, 1 / vectors["scale"])
    assert sqnr_db(x, back) == pytest.approx(vectors["sqnr_db"], rel=1e-6)
    assert underflow_frac(x, back) == pytest.approx(vectors["underflow_frac"], rel=1e-6)
    assert saturation_frac(payload, E4M3) == pytest.approx(vectors["saturation_frac"], rel=1e-6)
    update, effective = (torch.tensor([float(v) for v in vectors[k]], dtype=torch.float64) for k in ("update", "effective"))
    assert edq(update, effective) == pytest.approx(vectors["edq"], rel=1e-6)
    assert lost_frac(update, effective) == pytest.approx(vectors["lost_frac"], rel=1e-6)


def test_sqnr_of_known_noise():
    x = torch.ones(1000)
    assert sqnr_db(x, x * 1.1) == pytest.approx(20.0, abs=1e-4)
    assert sqnr_db(x.bfloat16(), x) == math.inf
    assert sqnr_db(x, torch.zeros(1000)) == 0.0


def test_underflow_counts_only_what_was_not_zero():
    x = torch.tensor([0.0, 0.0, 1e-9, 1.0])
    assert underflow_frac(x, torch.tensor([0.0, 0.0, 0.0, 1.0])) == 0.5
    assert underflow_frac(torch.zeros(3), torch.zeros(3)) == 0.0


def test_saturation_counts_both_signs():
    payload = torch.tensor([448.0, -448.0, 416.0, 0.0]).to(torch.float8_e4m3fn)
    assert saturation_frac(payload, E4M3) == 0.5


def test_edq_of_a_perfect_and_of_a_lost_update():
    update = torch.tensor([3.0, 4.0])
    assert edq(update, update) == pytest.approx(5.0)
    assert edq(update, torch.zeros(2)) == 0.0
    assert lost_frac(update, torch.tensor([3.0, 0.0])) == 0.5
    assert lost_frac(torch.zeros(2), torch.zeros(2)) == 0.0


def planted() -> torch.Tensor:
    """Normal values, some that vanish in E4M3 without a scale, some beyond its maximum, some zeros."""
    x = make("normal", (64, 32))
    x[:2] *= 2.0**-14
    x[2, :5] = 1e4
    x[3, :7] = 0
    return x


def tallied(*parts: tuple[torch.Tensor, float]) -> list[float]:
    row = torch.zeros(len(TALLY), dtype=torch.float64)
    for x, scale in parts:
        tally_(row, x, quantize(x, scale, E4M3), torch.tensor(1 / scale), E4M3)
    return row.tolist()


def test_a_tally_is_the_definitions(monkeypatch):
    x = planted()
    for chunk in (metrics.CHUNK, 100):
        monkeypatch.setattr(metrics, "CHUNK", chunk)
        found = judge(tallied((x, 0.5)))
        payload = quantize(x, 0.5, E4M3)
        values = dequantize(payload, 2.0)
        assert found["underflow"] == pytest.approx(underflow_frac(x, values))
        assert found["underflow"] > 0
        assert found["saturation"] == saturation_frac(payload, E4M3) == 5 / x.numel()
        assert found["sqnr_db"] == pytest.approx(sqnr_db(x, values), rel=1e-9)
        assert (found["amax"], found["scale"]) == (1e4, 0.5)


def test_tallies_of_parts_add_up():
    x = planted()
    assert tallied((x[:10], 1.0), (x[10:], 1.0)) == pytest.approx(tallied((x, 1.0)), rel=1e-12)
    assert add_tallies(tallied((x[:10], 2.0)), tallied((x[10:], 1.0))) == pytest.approx(tallied((x[:10], 2.0), (x[10:], 1.0)), rel=1e-12)


def test_a_tally_of_tiny_squares_and_of_what_is_not_finite():
    x = make("normal", (8, 32)) * 1e-30  # whose squares FP32 does not have
    assert judge(tallied((x, 2.0**100)))["sqnr_db"] == pytest.approx(sqnr_db(x, dequantize(quantize(x, 2.0**100, E4M3), 2.0**-100)))
    assert judge(tallied((torch.zeros(3), 1.0)))["sqnr_db"] == math.inf
    bad = judge(tallied((torch.tensor([1.0, math.nan]), 1.0)))
    assert math.isnan(bad["amax"])
    assert math.isnan(bad["sqnr_db"])
    assert math.isnan(add_tallies(tallied((x, 1.0)), tallied((torch.tensor([math.nan]), 1.0)))[6])
