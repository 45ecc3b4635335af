"""The scales between a stored weight and its FP8 operand: from the weight's own amax, by the definition."""

import pytest
import torch

from helpers.numerics import KINDS, make
from msamp.kernels.reference.weight_scales import weight_scales
from msamp.numerics.formats import E4M3, FP16
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import scale_from_amax
from msamp.numerics.tensor import ScalingTensor


@pytest.mark.parametrize("kind", KINDS)
def test_the_operand_is_the_cast_of_the_weight_s_values(kind):
    weight = ScalingTensor.quantize(make(kind, (64, 48)), FP16)
    multiplier, scale_inv = weight_scales(weight.payload, weight.scale_inv, E4M3.max)
    values = weight.dequantize(torch.float32)
    scale = scale_from_amax(values.abs().amax(), E4M3.max)
    assert scale_inv == 1 / scale
    assert quantize(weight.payload, multiplier, E4M3).float().equal(quantize(values, scale, E4M3).float())


def test_a_weight_of_zeros_has_a_scale_of_one():
    multiplier, scale_inv = weight_scales(torch.zeros(4, 4, dtype=torch.float16), torch.tensor(0.5), E4M3.max)
    assert (float(multiplier), float(scale_inv)) == (0.5, 1.0)
