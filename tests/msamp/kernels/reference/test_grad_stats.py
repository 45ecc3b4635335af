"""Sums of squares against exact fractions, amaxes against the values."""

from fractions import Fraction

import pytest
import torch

from helpers.numerics import KINDS, make
from msamp.kernels.reference.grad_stats import PAYLOAD_UNITS, carried, grad_stats
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.tensor import ScalingTensor

UNITS = 2**40


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_sum_of_squares(kind):
    x = make(kind, (64, 96))
    factor = 1 / x.abs().max().double()
    ((whole, rest),) = grad_stats(None, [x], factor[None], [UNITS], squares=True)[1].tolist()
    assert (whole + rest * 2.0**-30) / UNITS / factor**2 == pytest.approx(x.double().square().sum().item(), rel=1e-13)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
def test_of_a_payload_it_is_exact(fmt):
    g = ScalingTensor.quantize(make("normal", (32, 48)) * 100, fmt)
    ((whole, rest),) = grad_stats(None, [g])[1].tolist()
    want = sum(Fraction(v) ** 2 for v in g.payload.double().flatten().tolist()) * Fraction(PAYLOAD_UNITS)
    error = abs(Fraction(whole) + Fraction(rest, 2**30) - want)
    assert error == 0 if fmt is E4M3 else error <= g.numel() * Fraction(1, 2**31)
    assert 0 <= rest < 2**30


def test_amaxes_are_those_of_the_values_and_scales_are_told():
    x = make("normal", (5, 7))
    low, poisoned = ScalingTensor.quantize(x, E4M3), ScalingTensor.quantize(x / 0, FP16)
    stats, sums = grad_stats(None, [x, low, poisoned, x[:0]], squares=False)
    assert stats[0].tolist() == [float(x.abs().max()), float(low.dequantize().abs().max()), float("inf"), 0.0]
    assert stats[1].tolist() == [0.0, float(low.scale_inv), 0.0, 0.0]
    assert sums.shape == (0, 2)


def test_no_gradients():
    stats, sums = grad_stats(None, [])
    assert (stats.shape, sums.shape) == ((2, 0), (0, 2))


def test_carrying_keeps_the_number():
    sums = torch.tensor([[3, 2**30 + 5], [0, -1], [7, -(2**31)]])
    assert carried(sums).tolist() == [[4, 5], [-1, 2**30 - 1], [5, 0]]
