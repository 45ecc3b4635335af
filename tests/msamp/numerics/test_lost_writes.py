"""A write by hand whose change rounding loses warns; a load, a copy and an edit do not."""

import warnings

import pytest
import torch

from helpers.choices import each_value
from helpers.numerics import make
from msamp.numerics.formats import E4M3, FP16
from msamp.numerics.lost_writes import loading
from msamp.numerics.tensor import ScalingTensor

FORMATS = pytest.mark.parametrize("fmt", [E4M3, FP16], ids=str)
LOST = pytest.warns(UserWarning, match=r"smaller changes are lost.*msamp\.float_copy\(model\)")


def pair(fmt, dtype=torch.float32) -> tuple[ScalingTensor, ScalingTensor]:
    """A weight, and one that a training step away."""
    values = make("normal", (64, 32)) * 0.1
    steps = make("normal", (64, 32), 1).sign() * 1e-3
    return tuple(ScalingTensor.quantize(x.to(dtype), fmt) for x in (values, values + steps))


WRITES = {
    "data": lambda k, q, m: setattr(k, "data", k.data * m + q.data * (1 - m)),
    "copy": lambda k, q, m: k.copy_(k * m + q * (1 - m)),
    "copy into data": lambda k, q, m: k.data.copy_(k.data * m + q.data * (1 - m)),
    "lerp": lambda k, q, m: k.lerp_(q, 1 - m),
    "foreach": lambda k, q, m: torch._foreach_lerp_([k], [q], 1 - m),
    "sub": lambda k, q, m: k.sub_((1 - m) * (k - q)),
    "mul and add": lambda k, q, m: k.mul_(m).add_(q, alpha=1 - m),
}


@each_value(fmt=[E4M3, FP16], m=[0.999, 0.9999], dtype=[torch.float32, torch.bfloat16], write=list(WRITES))
def test_a_moving_average_in_few_bits_warns(write, dtype, m, fmt):
    k, q = pair(fmt, dtype)
    with LOST:
        for _ in range(2):  # the first write in BF16 rounds the finer values that stand there
            WRITES[write](k, q, m)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_load_and_an_edit_do_not_warn(dtype, fmt):
    values = make("normal", (64, 32)) * 0.1
    k = ScalingTensor.quantize(values, fmt)
    edited = k.dequantize(dtype)
    edited[3] *= 1.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        k.copy_(values.to(dtype))  # its own checkpoint, with more bits or fewer
        k.copy_(make("normal", (64, 32), 5).to(dtype))
        k.copy_(edited)
        k.data = edited * 1.01
        k.copy_(k.clone())
        with loading():
            k.copy_(k.dequantize(torch.bfloat16))
            k.copy_(k.dequantize(torch.bfloat16))
        k.copy_(torch.zeros(64, 32))
        ScalingTensor.quantize(torch.zeros(0, 4), fmt).copy_(torch.zeros(0, 4))


def test_a_change_that_arrives_does_not_warn():
    k, q = pair(FP16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        k.add_(torch.full((64, 32), 0.01))  # a merged adapter
        k.mul_(0.999)  # decay by hand folds into the scale
        k.lerp_(q, 0.5)
