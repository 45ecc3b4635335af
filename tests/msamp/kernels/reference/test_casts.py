""""""

import pytest
import torch

from helpers.numerics import KINDS, codes, make, random_floats
from msamp.kernels.reference.amax import amax
from msamp.kernels.reference.cast import cast
from msamp.kernels.reference.expert_cast import expert_cast
from msamp.kernels.reference.scale_from_amax import scale_from_amax, scale_from_maxima, weight_scales
from msamp.numerics import scaling
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.granularity import TENSORWISE, Group
from msamp.numerics.quantize import quantize
from msamp.numerics.tensor import ScalingTensor


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_definition_of_quantize(fmt, dtype):
    x = make("log-normal", (33, 17)).to(dtype)
    y = cast(x, torch.tensor(8.0), fmt.dtype)
    assert y.dtype == fmt.dtype
    assert codes(y).equal(codes(quantize(x, 8.0, fmt)))


def test_the_payload_is_row_major_whatever_comes_in():
    x = make("normal", (5, 8)).t()
    y = cast(x, torch.ones(()), E4M3.dtype)
    assert y.shape == (8, 5)
    assert y.is_contiguous()
    assert codes(y).equal(codes(quantize(x.contiguous(), 1.0, E4M3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_magnitude_in_fp32(dtype):
    x = torch.linspace(-3, 2, 101).to(dtype)
    assert amax(x).dtype == torch.float32
    assert amax(x) == 3
    assert amax(x.view(101, 1).t()) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_anything_not_finite_shows_as_infinity(bad):
    assert amax(torch.tensor([1.0, bad])) == float("inf")


def test_an_empty_tensor_has_none():
    assert amax(torch.empty(0, 16)) == 0


# Casts of all experts' weights, against one weight at a time.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_expert_is_cast_by_itself(dtype):
    weights = (make("normal", (3, 20, 36)) * torch.tensor([1.0, 100.0, 0.0]).view(3, 1, 1)).to(dtype)
    stored = torch.tensor([1.0, 0.5, 2.0])
    y, y_t, scale_invs = expert_cast(weights, stored, E4M3.dtype)
    for e in range(3):
        multiplier, scale_inv = weight_scales(weights[e], stored[e], E4M3.max)
        assert scale_invs[e] == scale_inv
        assert codes(y[e]).equal(codes(cast(weights[e], multiplier, E4M3.dtype)))
        assert codes(y_t[e]).equal(codes(y[e]).t())


def test_what_is_stored_in_fp8_keeps_its_codes():
    payload, stored = make("normal", (2, 8, 16)).to(E4M3.dtype), torch.tensor([0.5, 4.0])
    y, y_t, scale_invs = expert_cast(payload, stored, E4M3.dtype)
    assert y.numel() == 0
    assert y.dtype == E4M3.dtype
    assert codes(y_t).equal(codes(payload).transpose(1, 2))
    assert scale_invs.equal(stored)
    assert scale_invs.data_ptr() != stored.data_ptr(), "an operator returns no view of its argument"


def test_experts_whose_transpose_cannot_be_packed_are_refused():
    with pytest.raises(ValueError, match="there are 6 rows; their transpose needs a multiple of 4"):
        expert_cast(torch.ones(2, 6, 8), torch.ones(2), E4M3.dtype)


# The scale of an amax as an operator: the definition's numbers, with either kind of scale where there is no amax.


@pytest.mark.parametrize("given", [True, False])
def test_it_is_the_definition(given):
    amax = random_floats(1000, seed=4)
    last = torch.rand(1000) if given else None
    want = scaling.scale_from_amax(amax, 448.0, last if given else 0.5)
    assert scale_from_amax(amax, 448.0, last, 0.5).equal(want)


@pytest.mark.parametrize("bad", [1.0, 0.0, float("nan"), -float("inf")])
def test_the_scale_of_the_maxima_is_that_of_the_tensor(bad):
    x = random_floats(1000, seed=6).masked_fill(torch.arange(1000) % 9 > 0, 0.0).nan_to_num(0.0, 0.0, 0.0)
    x[17] = bad
    scale = scale_from_maxima(Group(64).maxima(x), 448.0)
    assert scale.shape == ()
    assert scale.equal(scale_from_amax(TENSORWISE.amax(x), 448.0, None, 1.0))


@pytest.mark.parametrize("kind", KINDS)
def test_the_operand_is_the_cast_of_the_weight_s_values(kind):
    weight = ScalingTensor.quantize(make(kind, (64, 48)), FP16)
    multiplier, scale_inv = weight_scales(weight.payload, weight.scale_inv, E4M3.max)
    values = weight.dequantize(torch.float32)
    scale = scaling.scale_from_amax(values.abs().amax(), E4M3.max)
    assert scale_inv == 1 / scale
    assert quantize(weight.payload, multiplier, E4M3).float().equal(quantize(values, scale, E4M3).float())


def test_a_weight_of_zeros_has_a_scale_of_one():
    multiplier, scale_inv = weight_scales(torch.zeros(4, 4, dtype=torch.float16), torch.tensor(0.5), E4M3.max)
    assert (float(multiplier), float(scale_inv)) == (0.5, 1.0)
