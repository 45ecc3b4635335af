"""FP8Gradient: a gradient in FP8 that behaves as the plain tensor of its values, through every alias. Reading: `test_elementwise`."""

import copy
import io
import pickle

import pytest
import torch

from helpers.choices import each_value
from helpers.numerics import codes, make
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.fp8_gradient import FP8Gradient
from msamp.numerics.tensor import ScalingTensor


def gradient(dtype=torch.bfloat16, fmt=E4M3, shape=(4, 6)) -> FP8Gradient:
    return FP8Gradient(ScalingTensor.quantize(make("normal", shape).to(dtype), fmt))


def is_narrow(g: FP8Gradient) -> bool:
    return isinstance(g.held, ScalingTensor)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_presents_its_parameter_s_dtype_and_stores_one_byte_per_element(dtype, fmt):
    p = torch.nn.Parameter(torch.zeros(4, 6, dtype=dtype))
    p.grad = g = gradient(dtype, fmt)
    assert (g.dtype, g.shape, g.stride(), g.requires_grad) == (dtype, (4, 6), (6, 1), False)
    assert (g.held.payload.dtype, g.held.payload.nbytes) == (fmt.dtype, 24)
    assert g.dequantize().equal(g.held.dequantize())
    assert "fp8" in repr(g)
    assert repr(g.view(-1)) == f"FP8Gradient({g.dequantize().view(-1)!r})"


# ------------------------------------------------------------------------------------------------------------------ writing

BY_NUMBER = {
    "mul_": lambda g: g.mul_(0.3),
    "div_": lambda g: g.div_(torch.tensor(4.0)),
    "*=": lambda g: g.data.mul_(torch.tensor([0.5])),
    "foreach": lambda g: torch._foreach_mul_([g], torch.tensor(0.3)),
    "foreach div": lambda g: torch._foreach_div_([g], 3.0),
    "GradScaler": lambda g: torch._amp_foreach_non_finite_check_and_unscale_([g], torch.zeros(1), torch.full((1,), 0.25)),
}
OTHERWISE = {
    "add_": lambda g: g.add_(torch.ones(4, 6)),
    "mul_ by a tensor": lambda g: g.mul_(torch.linspace(1, 2, 6)),
    "clamp_": lambda g: g.clamp_(-0.5, 0.5),
    "data.clamp_": lambda g: g.data.clamp_(-0.5, 0.5),
    "detach": lambda g: g.detach().sub_(1.0),
    "copy_": lambda g: g.copy_(torch.full((4, 6), 2.5)),
    "fill_": lambda g: g.fill_(0.125),
    "row": lambda g: g[1].add_(1.0),
    "item": lambda g: g[1:3][0].__setitem__(2, 7.0),
    "mask": lambda g: g.__setitem__(g > 0, 0.0),
    "view": lambda g: g.view(-1)[3:9].zero_(),
    "transpose": lambda g: g.t()[2].mul_(3.0),
    "split": lambda g: g.split(2)[1].neg_(),
    "chunk": lambda g: g.chunk(2, dim=1)[0].add_(1.0),
    "unbind": lambda g: g.unbind()[3].zero_(),
    "foreach add": lambda g: torch._foreach_add_([g], [torch.ones(4, 6)]),
    "foreach clamp": lambda g: torch._foreach_clamp_max_([g], 0.5),
    "nan_to_num out": lambda g: torch.nan_to_num(g, nan=0.0, out=g),
    "part by a number": lambda g: g[:2].mul_(0.5),
    "data": lambda g: setattr(g, "data", torch.full((4, 6), 1.5)),
}


@pytest.mark.parametrize("name", BY_NUMBER)
def test_a_number_folds_into_the_scale(name):
    g, plain = gradient(torch.float32), gradient(torch.float32).dequantize()
    payload = codes(g.held.payload)
    BY_NUMBER[name](g)
    BY_NUMBER[name](plain)
    assert is_narrow(g)
    assert codes(g.held.payload).equal(payload)
    assert torch.allclose(g.dequantize(), plain, rtol=1e-6)


@each_value(name=OTHERWISE, dtype=[torch.bfloat16, torch.float32])
def test_any_other_write_reaches_every_alias_as_in_a_plain_tensor(name, dtype):
    g, plain = gradient(dtype), gradient(dtype).dequantize()
    aliases = [g.detach(), g.data, g.view(2, 12), g.t(), g[1:3], *g.split(3)]
    OTHERWISE[name](g)
    OTHERWISE[name](plain)
    assert (type(g.held), g.held.dtype) == (torch.Tensor, dtype)
    assert g.held._version > 0  # by which an optimizer knows that it was written
    assert g.dequantize().equal(plain)
    for alias, want in zip(aliases, [plain, plain, plain.view(2, 12), plain.t(), plain[1:3], *plain.split(3)], strict=True):
        assert alias.dequantize().equal(want)


def test_zeros_stay_in_fp8_and_make_a_poisoned_gradient_valid():
    g = FP8Gradient(ScalingTensor.quantize(torch.tensor([[1.0, float("inf")]]), E4M3))
    assert g.isnan().all()
    torch._foreach_zero_([g, torch.ones(2)])
    assert is_narrow(g)
    assert g.eq(0).all()
    wide = gradient().add_(1.0)
    wide.zero_()
    assert is_narrow(wide)
    assert wide.held.payload.nbytes == 24
    assert wide.add_(1.0).eq(1).all()
    part = gradient()
    part[0].zero_()
    assert not is_narrow(part)
    assert not part.was_zeroed


@pytest.mark.filterwarnings("ignore:aten.add_.Tensor stores into fp8-e4m3")
def test_a_plain_tensor_and_a_weight_take_its_values():
    g = gradient(torch.float32)
    plain, weight = torch.zeros(4, 6), torch.nn.Parameter(ScalingTensor.quantize(torch.ones(4, 6), E4M3))
    plain.add_(g, alpha=2.0)
    assert plain.equal(g.dequantize() * 2)
    weight.data.add_(g, alpha=-0.5)
    assert torch.allclose(weight.dequantize(), (1 - g.dequantize() / 2), rtol=0.07)
    assert torch.empty(4, 6).copy_(g).equal(g.dequantize())


# ------------------------------------------------------------------------------------------------------------------- copies


def saved(g):
    file = io.BytesIO()
    torch.save(g, file)
    assert file.tell() < 4000
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g)), saved])
def test_a_copy_has_the_same_form_and_shares_nothing(how):
    flat = torch.zeros(2**16, dtype=torch.float8_e4m3fn)  # a payload lies in a buffer of many
    flat[:24] = gradient().held.payload.flatten()
    g = FP8Gradient(ScalingTensor(flat[:24].view(4, 6), torch.tensor(0.5), torch.bfloat16))
    other = how(g)
    assert is_narrow(other)
    assert other.dtype == torch.bfloat16
    assert other.equal(g)
    g.mul_(0.0)
    assert not other.eq(0).all()
    row = how(gradient()[1])
    assert row.equal(gradient().dequantize()[1])
    wide = how(gradient().add_(1.0))
    assert wide.equal(gradient().dequantize() + 1)
