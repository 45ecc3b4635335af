"""Sums of micro-batches in FP8 and FP16, against the casts and the FP32 sums that define them."""

import pytest
import torch

from helpers.numerics import KINDS, SMALL, bits, make
from msamp.kernels.reference.accumulate import accumulate, add_payload_, key_of_draw
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.stochastic_rounding import Thresholds, cast_stochastically
from msamp.numerics.tensor import ScalingTensor

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
