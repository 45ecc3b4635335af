"""Scaled states: their scales follow from bounds."""

import pytest
import torch
from numerics import KINDS, LARGE, SMALL, check, codes, make, measure
from torch import nn

from msamp.kernels.reference.adamw import load, store_
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32
from msamp.numerics.quantize import quantize
from msamp.numerics.recipe import FP32_STATES, O2
from msamp.numerics.scaling import scale_from_amax
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.adamw import FP8AdamW
from msamp.optim.state_format import PlainFormat
from msamp.optim.state_fp8 import ScaledFormat, state_format

every_scaled = pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)


def test_which_class_stores_a_format():
    assert [type(state_format(f)) for f in (FP32, BF16)] == [PlainFormat] * 2
    assert [type(state_format(f)) for f in (FP16, E4M3, E5M2)] == [ScaledFormat] * 3
    assert state_format(E5M2).format is E5M2


@every_scaled
def test_a_state_begins_at_zero_with_scale_one(fmt, device):
    state = state_format(fmt).init(torch.ones(3, 5, device=device))
    assert isinstance(state, ScalingTensor)
    assert (state.format, state.shape, state.device.type) == (fmt, (3, 5), device.type)
    assert state.scale_inv == 1
    (loaded,) = load([state])
    assert loaded.dtype == torch.float32
    assert loaded.eq(0).all()


@every_scaled
def test_the_bound_decides_the_scale_not_the_values(fmt):
    how = state_format(fmt)
    states = [how.init(torch.empty(6, 4)) for _ in range(2)]
    values = [make("normal", (6, 4), seed=s) for s in range(2)]
    bounds = torch.tensor([7.0, 300.0])
    store_(states, values, bounds)
    for state, value, bound in zip(states, values, bounds, strict=True):
        scale = scale_from_amax(bound, fmt.max)
        assert state.scale_inv == 1 / scale
        assert codes(state.payload).equal(codes(quantize(value, scale, fmt)))


@pytest.mark.parametrize("bound", [0.0, float("inf"), float("nan")])
def test_a_bound_that_says_nothing_keeps_the_last_scale(bound):
    how = state_format(E4M3)
    state = how.init(torch.empty(4))
    store_([state], [torch.ones(4)], torch.tensor([10.0]))
    assert state.scale_inv == 1 / 32
    store_([state], [torch.zeros(4)], torch.tensor([bound]))
    assert state.scale_inv == 1 / 32


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_states_against_fp32_three_ways(kind, shape, device):
    weight = make("normal", shape, seed=9, device=device) * 0.02
    low, plain = nn.Parameter(ScalingTensor.quantize(weight, FP16)), nn.Parameter(weight.clone())
    optimizers = FP8AdamW([low], formats=O2.states), FP8AdamW([plain], formats=FP32_STATES)
    for step in range(5):
        g = make(kind, shape, seed=step, device=device) * 1e-3
        low.grad, plain.grad = g, g.clone()
        for optimizer in optimizers:
            optimizer.step()
    got, want = optimizers[0].state[low], optimizers[1].state[plain]
    check("m", "fp8-e4m3", kind, shape, measure(want["exp_avg"], got["exp_avg"].dequantize(), got["exp_avg"].payload, E4M3))
    check("v", "fp16", kind, shape, measure(want["exp_avg_sq"], got["exp_avg_sq"].dequantize(), got["exp_avg_sq"].payload, FP16))
    check("master", "fp16", kind, shape, measure(plain, low.dequantize(), low.payload, FP16))
