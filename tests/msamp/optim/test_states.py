"""How optimizer states begin and are stored; masters; and states as they were saved."""

import pytest
import torch
from torch import nn

from helpers.choices import each_once, each_value, every_value
from helpers.numerics import KINDS, LARGE, SMALL, check, codes, make, measure
from msamp.kernels.reference.store import load, store_
from msamp.numerics.formats import BF16, COAT_E5M2, E4M3, E5M2, EXPANDED, FP16, FP32, PLAIN_FP16
from msamp.numerics.quantize import quantize
from msamp.numerics.range_expand import Expanded, quantize_expanded
from msamp.numerics.recipe import FP32_STATES, O2
from msamp.numerics.scaling import scale_from_amax
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.states import as_stored, begun, by_key, make_master, own_values

# ---------------------------------------------------------------------------------------------------------------- plain


@pytest.mark.parametrize("fmt", [FP32, BF16], ids=str)
def test_a_plain_state_begins_at_zero_and_takes_what_is_stored(fmt, device):
    state = begun("m", fmt, torch.ones(3, 5, device=device, dtype=torch.bfloat16))["m"]
    assert (state.dtype, state.shape, state.device.type) == (fmt.dtype, (3, 5), device.type)
    assert state.eq(0).all()
    value = make("normal", (3, 5), device=device)
    store_([state], [value], None)
    assert state.equal(value.to(fmt.dtype))
    (loaded,) = load([state])
    assert loaded.dtype == torch.float32
    assert loaded.equal(state.float())


# --------------------------------------------------------------------------------------------------------------- scaled


every_scaled = pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)


@every_scaled
def test_a_state_begins_at_zero_with_scale_one(fmt, device):
    state = begun("m", fmt, torch.ones(3, 5, device=device))["m"]
    assert isinstance(state, ScalingTensor)
    assert (state.format, state.shape, state.device.type) == (fmt, (3, 5), device.type)
    assert state.scale_inv == 1
    (loaded,) = load([state])
    assert loaded.dtype == torch.float32
    assert loaded.eq(0).all()


@every_scaled
def test_the_bound_decides_the_scale_not_the_values(fmt):
    states = [begun("m", fmt, torch.empty(6, 4))["m"] for _ in range(2)]
    values = [make("normal", (6, 4), seed=s) for s in range(2)]
    bounds = torch.tensor([7.0, 300.0])
    store_(states, values, bounds)
    for state, value, bound in zip(states, values, bounds, strict=True):
        scale = scale_from_amax(bound, fmt.max)
        assert state.scale_inv == 1 / scale
        assert codes(state.payload).equal(codes(quantize(value, scale, fmt)))


@each_once(2.0, kind=KINDS, shape=[SMALL, LARGE])
def test_states_against_fp32_three_ways(kind, shape, device):
    weight = make("normal", shape, seed=9, device=device) * 0.02
    low, plain = nn.Parameter(ScalingTensor.quantize(weight, FP16)), nn.Parameter(weight.clone())
    nearest = O2.with_rounding(master="nearest", moments="nearest").states  # stochastic rounding has three decibels more noise
    optimizers = LowPrecisionOptimizer([low], formats=nearest), LowPrecisionOptimizer([plain], formats=FP32_STATES)
    for step in range(5):
        g = make(kind, shape, seed=step, device=device) * 1e-3
        low.grad, plain.grad = g, g.clone()
        for optimizer in optimizers:
            optimizer.step()
    got, want = optimizers[0].state[low], optimizers[1].state[plain]
    check("m", "fp8-e4m3", kind, shape, measure(want["exp_avg"], got["exp_avg"].dequantize(), got["exp_avg"].payload, E4M3))
    check("v", "fp16", kind, shape, measure(want["exp_avg_sq"], got["exp_avg_sq"].dequantize(), got["exp_avg_sq"].payload, FP16))
    check("master", "fp16", kind, shape, measure(plain, low.dequantize(), low.payload, FP16))


# --------------------------------------------------------------------------------------------------------------- COAT's


@every_value
@pytest.mark.parametrize("fmt", EXPANDED, ids=str)
@pytest.mark.parametrize(("shape", "groups"), [((4, 256), (4, 2)), ((2, 3, 129), (2, 3, 2)), ((5,), (1,)), ((), (1,)), ((0, 4), (0, 1))])
def test_a_state_begins_at_zero_with_exponents_of_one(fmt, shape, groups, device):
    state = begun("exp_avg", fmt, torch.ones(shape, device=device))
    assert {key: (x.shape, x.dtype, x.device.type) for key, x in state.items()} == {
        "exp_avg": (shape, fmt.dtype, device.type),
        "exp_avg_max": (groups, torch.float32, device.type),
        "exp_avg_k": (groups, torch.float32, device.type),
    }
    assert sum(x.nbytes for x in state.values()) == fmt.bytes_of(shape)
    stored, zeros = as_stored(state, "exp_avg"), quantize_expanded(torch.zeros(shape), fmt)
    assert isinstance(stored, Expanded)
    assert (codes(stored.payload).tolist(), stored.max.tolist(), stored.k.tolist()) == (
        codes(zeros.payload).tolist(),
        zeros.max.tolist(),
        zeros.k.tolist(),
    )


# ------------------------------------------------------------------------------------------------- of any stored state


@pytest.mark.parametrize("fmt", [FP32, E4M3, COAT_E5M2], ids=str)
def test_a_state_is_taken_apart_as_it_is_put_together(fmt):
    state = begun("trace", fmt, torch.ones(3, 200))
    assert by_key("trace", as_stored(state, "trace")).keys() == state.keys()
    assert own_values(as_stored(state, "trace")).eq(0).all()


# -------------------------------------------------------------------------------------------------------------- masters


SCALED, PLAIN = (FP16, E4M3, E5M2), (FP32, BF16, PLAIN_FP16)


def parameter(fmt) -> nn.Parameter:
    x = make("normal", (16, 8))
    return nn.Parameter(ScalingTensor.quantize(x, fmt) if fmt.scaled else x.to(fmt.dtype))


@each_value(fmt=[*SCALED, *PLAIN], master=[*SCALED, FP32, BF16])
def test_a_copy_holds_the_parameter_s_values(fmt, master):
    p = parameter(fmt)
    copy = make_master(p, master)
    values = p.dequantize(torch.float32) if fmt.scaled else p.detach().float()
    if master.scaled:
        assert torch.equal(copy, ScalingTensor.quantize(values, master))
    else:
        assert copy.equal(values.to(master.dtype))
    assert not copy.requires_grad
