"""The aten table: what is in it keeps payload and scale, what is not raises with its name."""

import math
import warnings

import pytest
import torch

import msamp
from helpers.choices import each_value
from helpers.numerics import codes, make
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.tensor import ScalingTensor

every_format = pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)


def tensor(fmt=E4M3, shape=(4, 6)) -> ScalingTensor:
    return ScalingTensor.quantize(make("normal", shape), fmt)


VIEWS = {
    "detach": lambda x: x.detach(),
    "view": lambda x: x.view(2, 12),
    "view flat": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(6, 4),
    "flatten": lambda x: x.flatten(),
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
}


@each_value(fmt=[E4M3, E5M2, FP16], name=VIEWS)
def test_views_share_the_payload_and_keep_the_scale(name, fmt):
    x = tensor(fmt)
    y = VIEWS[name](x)
    assert isinstance(y, ScalingTensor)
    assert y.payload.data_ptr() == x.payload.data_ptr()
    assert y.scale_inv is x.scale_inv
    assert y.dequantize().equal(VIEWS[name](x.dequantize()))
    assert y.stride() == y.payload.stride()


@every_format
def test_a_transposed_tensor_becomes_contiguous(fmt):
    x = tensor(fmt)
    y = x.t().contiguous()
    assert y.is_contiguous()
    assert y.payload.is_contiguous()
    assert y.dequantize().equal(x.dequantize().t())


LIKE = {"zeros_like": 0.0, "ones_like": 1.0}


@pytest.mark.parametrize("name", LIKE)
def test_new_tensors_like_it_are_plain(name, device):
    x = tensor().to(device)
    y = getattr(torch, name)(x)
    assert type(y) is torch.Tensor
    assert (y.dtype, y.shape, y.device) == (x.dtype, x.shape, x.device)
    assert y.eq(LIKE[name]).all()
    assert getattr(torch, name)(x, dtype=torch.float64).dtype == torch.float64


MULTIPLY = {
    "mul_ number": (lambda x: x.mul_(0.3), 0.3),
    "mul_ tensor": (lambda x: x.mul_(torch.tensor(0.3)), 0.3),
    "mul_ one element": (lambda x: x.mul_(torch.tensor([0.3])), 0.3),
    "div_ number": (lambda x: x.div_(4.0), 0.25),
    "div_ tensor": (lambda x: x.div_(torch.tensor(4.0)), 0.25),
}


@pytest.mark.parametrize("name", MULTIPLY)
def test_a_factor_folds_into_the_scale(name):
    multiply, factor = MULTIPLY[name]
    x = tensor()
    values, payload = x.dequantize(), codes(x.payload)
    assert multiply(x) is x
    assert codes(x.payload).equal(payload)
    assert x.scale_inv.shape == ()
    assert torch.allclose(x.dequantize(), values * factor, rtol=1e-6)


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_norm_is_that_of_the_values(order):
    x = tensor()
    assert torch.linalg.vector_norm(x, order) == torch.linalg.vector_norm(x.dequantize(), order)
    assert x.norm() == x.dequantize().norm()


@every_format
def test_copy_from_plain_quantises_with_a_scale_of_its_own(fmt):
    x, values = tensor(fmt), make("log-normal", (4, 6), seed=5) * 1000
    assert x.copy_(values) is x
    want = ScalingTensor.quantize(values, fmt)
    assert torch.equal(x, want)
    x.copy_(values.bfloat16())
    assert torch.equal(x, ScalingTensor.quantize(values.bfloat16(), fmt, dtype=torch.float32))


@every_format
def test_copy_within_a_format_takes_the_bits(fmt):
    x, y = tensor(fmt), ScalingTensor.quantize(make("normal", (4, 6), seed=6), fmt, torch.tensor(2.0))
    x.copy_(y)
    assert torch.equal(x, y)
    assert x.scale_inv is not y.scale_inv


REFUSED = {
    "aten._softmax.default": lambda x: x.softmax(-1),
    "aten.select.int": lambda x: x[0],
    "aten.slice.Tensor": lambda x: x[1:3],
    "aten.expand.default": lambda x: x.expand(2, 4, 6),
    "aten.split.Tensor": lambda x: x.split(2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_not_in_the_table_raises_with_its_name(name):
    with pytest.raises(RuntimeError, match=rf"({name.strip()}) is not defined for a ScalingTensor; call \.dequantize\(\) first"):
        REFUSED[name](tensor())


@pytest.mark.promise("Conversion", "An unsupported operation names the layer and the filter that keeps it unconverted.")
def test_an_undefined_operation_names_the_layer_and_how_to_keep_it():
    x = tensor()
    x.label = "blocks.0.qkv.weight"
    with pytest.raises(RuntimeError, match=r"It is blocks\.0\.qkv\.weight of the model; .*accept=.*exclude_names\(r'\^blocks") as caught:
        torch.cat([torch.ones(4, 6), torch.nn.Parameter(x).detach()])
    accept = eval(str(caught.value).partition("accept=")[2][:-1], {"msamp": msamp})
    layer = torch.nn.Linear(32, 32)
    assert accept("blocks.1.qkv", layer)
    assert not accept("blocks.0.qkv", layer)


ONES = torch.ones(4, 6)
COMPUTED = {
    "add number": lambda x: x + 1,
    "add to plain": lambda x: ONES + x,
    "sub": lambda x: x - ONES,
    "number minus": lambda x: 1 - x,
    "mul": lambda x: x * 2.0,
    "mul elements": lambda x: x * ONES,
    "div": lambda x: x / 3,
    "neg": lambda x: -x,
    "lerp": lambda x: torch.lerp(x, ONES, 0.1),
    "lerp of plain": lambda x: torch.lerp(ONES, x, 0.1),
    "matmul": lambda x: ONES.t() @ x,
    "linear": lambda x: torch.nn.functional.linear(torch.ones(2, 3, 6), x, torch.ones(4)),
    "sum": lambda x: x.sum(),
    "isfinite": lambda x: torch.isfinite(x),
    "foreach": lambda x: torch._foreach_sub([x, ONES], [ONES, x])[1],
}


@each_value(name=COMPUTED, fmt=[E4M3, E5M2, FP16])
def test_arithmetic_gives_a_plain_tensor_of_the_values(name, fmt):
    x = tensor(fmt)
    got = COMPUTED[name](x)
    assert type(got) is torch.Tensor
    assert torch.allclose(got, COMPUTED[name](x.dequantize()), rtol=1e-6, atol=1e-6)
    with torch.inference_mode():
        assert torch.allclose(COMPUTED[name](x), got, rtol=1e-6, atol=1e-6)


STORED = {
    "add_": lambda x: x.add_(ONES, alpha=0.5),
    "iadd": lambda x: x.__iadd__(1.0),
    "sub_": lambda x: x.sub_(ONES),
    "mul_ elements": lambda x: x.mul_(ONES * 3),
    "lerp_": lambda x: x.lerp_(ONES, 0.25),
    "lerp_ bf16": lambda x: x.lerp_(ONES.bfloat16().to(x.dtype), 0.25),
    "addcdiv_": lambda x: x.addcdiv_(ONES, ONES * 2),
    "foreach lerp_": lambda x: torch._foreach_lerp_([x], [ONES], 0.25),
    "foreach add_": lambda x: torch._foreach_add_([x], [ONES], alpha=2),
    "fill_": lambda x: x.fill_(0.5),
}


@pytest.mark.promise("Conversion", "Arithmetic on a weight returns a plain tensor; in place it is computed in FP32 and stored.")
@pytest.mark.parametrize("name", STORED)
def test_arithmetic_in_place_is_stored_with_a_scale_of_its_own(name):
    x = tensor(FP16)
    want, version = x.dequantize(), x.payload._version
    payload = x.payload
    STORED[name](want)
    STORED[name](x)
    assert x.payload is payload
    assert x.payload._version > version
    assert torch.equal(x, ScalingTensor.quantize(want, FP16))


@every_format
def test_in_place_a_value_that_is_not_finite_becomes_nan_alone(fmt):
    x = ScalingTensor.quantize(torch.tensor([1.0, 0.0, 3.0, 8.0]), fmt)
    x.log_()
    assert x.isnan().tolist() == [False, True, False, False]
    assert x.nan_to_num_(nan=0.5).equal(ScalingTensor.quantize(torch.tensor([1.0, math.exp(0.5), 3.0, 8.0]).log(), fmt))
    assert x.copy_(torch.tensor([math.inf, -math.inf, math.nan, 3.0])).isnan().tolist() == [True, True, True, False]
    assert x.zero_() is x
    assert x.dequantize().eq(0).all()


def test_an_average_in_fp8_is_warned_of_and_an_initialisation_is_not():
    with pytest.warns(UserWarning, match=r"lerp_.* stores into fp8-e4m3, in steps of 0\.125 of a value.*msamp\.float_copy"):
        tensor(E4M3).lerp_(ONES, 0.001)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor(E4M3).fill_(1.0)
        tensor(FP16).lerp_(ONES, 0.001)


CHANGES = {
    "copy_ plain": lambda x: x.copy_(torch.ones(4, 6)),
    "copy_ same format": lambda x: x.copy_(tensor()),
    "copy_ through detach": lambda x: x.detach().copy_(torch.ones(4, 6)),
    "copy_ through data": lambda x: x.data.copy_(torch.ones(4, 6)),
    "mul_": lambda x: x.mul_(2.0),
    "zero_": lambda x: x.zero_(),
    "store_": lambda x: x.store_(torch.ones(4, 6)),
    "mul_ elements": lambda x: x.mul_(torch.full((4, 6), 2.0)),
    "data": lambda x: setattr(x, "data", torch.ones(4, 6)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_in_place_is_counted(name):
    # What was made from the old values (a cached scale, a tensor saved for backward) has to notice.
    x = tensor()
    before = (x.payload._version, x.scale_inv._version)
    CHANGES[name](x)
    assert (x.payload._version, x.scale_inv._version) > before


@every_format
@pytest.mark.parametrize("bad", [None, "payload", "scale"])
def test_grad_scaler_unscales_by_the_scale_and_finds_what_is_not_finite(fmt, bad):
    x, plain, found = tensor(fmt), make("normal", (5,)), torch.zeros(())
    if bad == "payload":
        x.payload.view(torch.uint8 if fmt.bytes == 1 else torch.int16)[0, 0] = 0x7F if fmt.bytes == 1 else 0x7E00
    if bad == "scale":
        x.scale_inv.fill_(float("nan"))
    before, values = x.payload.clone(), x.dequantize().clone()
    torch._amp_foreach_non_finite_check_and_unscale_([x, plain], found, torch.tensor(0.25))
    assert bool(found) == (bad is not None)
    assert torch.equal(x.payload.view(torch.uint8), before.view(torch.uint8))
    assert x.dequantize().allclose(values / 4, equal_nan=True)
    assert plain.equal(make("normal", (5,)) / 4)
