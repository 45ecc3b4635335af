"""Sums of parts and of payloads: against FP64, in every dtype; what is refused."""

from fractions import Fraction

import pytest
import torch

from helpers.choices import every_pair
from helpers.numerics import KINDS, SMALL, bits, make
from msamp.kernels.reference.accumulate import accumulate, add_payload_, key_of_draw
from msamp.kernels.reference.grad_stats import PAYLOAD_UNITS, carried, grad_stats
from msamp.kernels.reference.sums import sum_parts, sum_payloads
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32
from msamp.numerics.stochastic_rounding import Thresholds, cast_stochastically
from msamp.numerics.tensor import ScalingTensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_tensor_is_added_up_and_rounded_once(dtype):
    parts = [make("normal", (rows, width), seed=rows) for rows, width in ((1, 40), (70, 3), (5, 1))]
    for x, got in zip(parts, sum_parts(parts, dtype), strict=True):
        assert (got.shape, got.dtype) == (x.shape[1:], dtype)
        torch.testing.assert_close(got.double(), x.double().sum(0), rtol=torch.finfo(dtype).eps, atol=1e-5)


ALL = (E4M3, E5M2, BF16, FP16, FP32)


@every_pair
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ALL, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_it_is_the_sum_rounded_once(ranks, fmt, kind):
    payloads = make(kind, (ranks, 300)).clamp(-400, 400).to(fmt.dtype)
    got = sum_payloads(payloads, torch.tensor(0.25), torch.bfloat16)
    want = (payloads.double().sum(0) * 0.25).bfloat16()
    torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-6 * float(payloads.double().abs().sum(0).max()))
    assert payloads.equal(payloads.clone())


def test_the_order_is_that_of_the_ranks():
    assert sum_payloads(torch.tensor([[2.0**25], [1.0], [-(2.0**25)], [3.0]]).bfloat16(), None, torch.float32).item() == 3.0


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_an_fp8_sum_saturates_and_keeps_nan(fmt):
    payloads = torch.tensor([[fmt.max, 1.0, float("nan"), -fmt.max], [fmt.max, 1.0, 1.0, -fmt.max]]).to(fmt.dtype)
    got = sum_payloads(payloads, None, fmt.dtype).float()
    assert got[:2].tolist() == [fmt.max, 2.0]
    assert got[2].isnan()
    assert got[3] == -fmt.max


@pytest.mark.parametrize("rank", range(3))
def test_the_own_part_stands_for_its_row(rank):
    payloads = make("normal", (3, 40)).bfloat16()
    own, without = payloads[rank].clone(), payloads.clone()
    without[rank] = float("nan")
    assert sum_payloads(without, None, torch.float32, own, rank).equal(sum_payloads(payloads, None, torch.float32))


def test_nothing_sent_is_nothing_summed():
    assert bits(sum_payloads(torch.empty(3, 0), None, torch.bfloat16)).numel() == 0


# Sums of micro-batches in FP8 and FP16, against the casts and the FP32 sums that define them.


KEY = 0x123456789ABCDEF


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
def test_a_sum_is_the_cast_of_the_fp32_sum(fmt, kind):
    a, b = (make(kind, SMALL, seed=i).bfloat16() for i in range(2))
    payload, scale_inv = torch.full(SMALL, 2.0).to(fmt.dtype), torch.tensor(3.0)
    accumulate(a, payload, scale_inv, None, 0, True)
    first = ScalingTensor.quantize(a, fmt)
    assert bits(payload).equal(bits(first.payload))
    accumulate(b, payload, scale_inv, None, 0, False)
    want = ScalingTensor.quantize(first.dequantize(torch.float32) + b.float(), fmt)
    assert bits(payload).equal(bits(want.payload))
    assert scale_inv.equal(want.scale_inv)
    add_payload_(a, payload, scale_inv)
    add_payload_(b, payload, scale_inv, replace=True)
    assert b.equal(want.dequantize(torch.float32).bfloat16())
    assert a.equal((want.dequantize(torch.float32) + make(kind, SMALL).bfloat16().float()).bfloat16())


def test_each_draw_has_its_key_and_advances_the_number():
    g, draw = make("normal", SMALL), torch.full((), 2**33 + 6, dtype=torch.int64)
    payload, scale_inv = torch.empty(SMALL, dtype=E4M3.dtype), torch.zeros(())
    accumulate(g, payload, scale_inv, draw, KEY, True)
    assert int(draw) == 2**33 + 7
    thresholds = Thresholds(key_of_draw(KEY, 2**33 + 7), 0, 0)
    assert bits(payload).equal(bits(cast_stochastically(g / scale_inv, E4M3, thresholds, "m")))


def test_keys_of_many_draws_differ_in_both_words():
    keys = [key_of_draw(KEY, step * 2**20 + i) for step in (0, 1, 4096, 10**6) for i in range(3)]
    assert len({key % 2**32 for key in keys}) == len(keys)


# Sums of squares against exact fractions, amaxes against the values.


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
