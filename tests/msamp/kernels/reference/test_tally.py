"""The recorder's sums against the definitions of what they are sums of."""

import math

import pytest
import torch

from helpers.numerics import make, undelivered_frac
from msamp.kernels.reference import tally
from msamp.kernels.reference.tally import count_, tally_, tally_update_
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.metrics import TALLY, add_tallies, edq, judge, lost_frac, saturation_frac, sqnr_db, undelivered_share, underflow_frac
from msamp.numerics.quantize import dequantize, quantize


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
        tally_(row, x, quantize(x, scale, E4M3), torch.tensor(1 / scale))
    return row.tolist()


def test_a_tally_is_the_definitions(monkeypatch):
    x = planted()
    for chunk in (tally.CHUNK, 100):
        monkeypatch.setattr(tally, "CHUNK", chunk)
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


def test_nothing_adds_nothing():
    row = torch.arange(8, dtype=torch.float64)
    tally_(row, torch.zeros(0, 4), torch.zeros(0, 4).to(E4M3.dtype), torch.tensor(3.0))
    assert row.tolist() == list(range(8))


def test_an_update_s_sums_are_the_definitions(monkeypatch):
    before = make("normal", (16, 32))
    wanted = before + make("normal", (16, 32), seed=1) * 1e-2
    wanted[:3] = before[:3]
    stored = quantize(wanted, 64.0, E4M3)
    after = dequantize(stored, 1 / 64)
    for chunk in (tally.CHUNK, 100):
        monkeypatch.setattr(tally, "CHUNK", chunk)
        row = torch.zeros(7, dtype=torch.float64)
        tally_update_(row, before, wanted, stored, torch.tensor(1 / 64))
        elements, squares, norm, product, lost, distance, arrived = row.tolist()
        assert elements == before.numel()
        assert squares == pytest.approx(float(after.double().square().sum()), rel=1e-12)
        assert norm == pytest.approx(float((wanted.double() - before.double()).square().sum()), rel=1e-12)
        assert product / math.sqrt(norm) == pytest.approx(
            edq(wanted.double() - before.double(), after.double() - before.double()), rel=1e-9
        )
        assert lost / elements == lost_frac(wanted - before, after - before)
        assert distance == pytest.approx(float((wanted.double() - before.double()).abs().sum()), rel=1e-12)
        share = undelivered_frac(wanted.double() - before.double(), after.double() - before.double())
        assert undelivered_share(distance, arrived) == pytest.approx(share, rel=1e-9)
    same = torch.zeros(7, dtype=torch.float64)
    tally_update_(same, before, wanted, before, torch.ones(()))
    assert same[4] == (wanted != before).sum()
    assert same[6] == 0


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
def test_elements_are_counted_one_by_one(fmt, monkeypatch):
    """3 at the maximum (two beyond it), 2 that vanish, 3 zeros (one negative), 4 in between, and NaN; added to what is there."""
    top, small = fmt.max, fmt.smallest
    values = torch.tensor([top, -2 * top, 1e30, small / 2, -small / 4, 0.0, 0.0, -0.0, 1.0, -1.0, small, top / 2])
    payload = quantize(values, 1.0, fmt)
    row = torch.tensor([1, 10, 100])
    count_(row, values, payload)
    assert row.tolist() == [10, 13, 102]
    monkeypatch.setattr(tally, "CHUNK", 5)
    count_(row, values.view(3, 4), payload.view(3, 4))
    assert row.tolist() == [19, 16, 104]
    count_(row, payload, payload)  # the sum where no rank has it in FP32
    assert row.tolist() == [26, 19, 104]
    bad = torch.tensor([math.nan, 1.0])
    count_(row, bad, quantize(bad, 1.0, fmt))
    count_(row, bad[:0], quantize(bad[:0], 1.0, fmt))
    assert row.tolist() == [28, 19, 104]
