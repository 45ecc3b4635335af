from fractions import Fraction

import pytest
import torch
from numerics import make

from msamp.kernels.reference.square_sum import square_sum
from msamp.numerics.formats import E4M3, E5M2, FP16

UNITS = 2.0**40


@pytest.mark.parametrize("kind", ["normal", "channel-outlier", "log-normal"])
def test_it_is_the_sum_of_squares(kind):
    x = make(kind, (64, 96))
    factor = 1 / x.abs().max().double()
    whole, rest = square_sum(x, factor, UNITS).tolist()
    got = (whole + rest * 2.0**-30) / UNITS / factor**2
    assert got == pytest.approx(x.double().square().sum().item(), rel=1e-13)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
def test_of_a_payload_it_is_exact(fmt):
    payload = (make("normal", (32, 48)) * 100).to(fmt.dtype)
    factor = torch.tensor(2.0**-10, dtype=torch.float64)
    whole, rest = square_sum(payload, factor, UNITS).tolist()
    want = sum(Fraction(v) ** 2 for v in payload.double().flatten().tolist()) / 2**20 * 2**40
    assert abs(Fraction(whole) + Fraction(rest, 2**30) - want) <= payload.numel() * Fraction(1, 2**31)


def test_any_cut_and_order_adds_up_to_the_same_bits():
    x = make("log-normal", (100, 33))
    factor = (1 / x.abs().max()).double()
    whole = square_sum(x, factor, UNITS)
    for cut in (1, 7, 64):
        assert whole.equal(square_sum(x[:cut].flip(0), factor, UNITS) + square_sum(x[cut:], factor, UNITS))


def test_an_empty_tensor_has_none():
    assert square_sum(torch.empty(0, 4), torch.ones((), dtype=torch.float64), UNITS).tolist() == [0, 0]
