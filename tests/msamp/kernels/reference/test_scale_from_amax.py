"""The scale of an amax as an operator: the definition's numbers, with either kind of scale where there is no amax."""

import pytest
import torch

from helpers.numerics import KINDS, make, random_floats
from msamp.kernels.reference.scale_from_amax import scale_from_amax, scale_from_maxima, weight_scales
from msamp.numerics import scaling
from msamp.numerics.formats import E4M3, FP16
from msamp.numerics.granularity import TENSORWISE, Group
from msamp.numerics.quantize import quantize
from msamp.numerics.range_expand import two_stage_amax
from msamp.numerics.tensor import ScalingTensor


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
    scale = scale_from_maxima(two_stage_amax(x, Group(64))[0], 448.0)
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
