import pytest
import torch
from numerics import make
from torch import nn

from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, PLAIN_FP16
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.master import is_own_master, make_master, weight_format

SCALED, PLAIN = (FP16, E4M3, E5M2), (FP32, BF16, PLAIN_FP16)


def parameter(fmt) -> nn.Parameter:
    x = make("normal", (16, 8))
    return nn.Parameter(ScalingTensor.quantize(x, fmt) if fmt.scaled else x.to(fmt.dtype))


@pytest.mark.parametrize("fmt", [*SCALED, *PLAIN], ids=str)
@pytest.mark.parametrize("master", [*SCALED, *PLAIN], ids=str)
def test_a_parameter_in_the_master_s_format_needs_no_copy(fmt, master):
    assert weight_format(parameter(fmt)) is fmt
    assert is_own_master(parameter(fmt), master) == (fmt is master)


@pytest.mark.parametrize("fmt", [*SCALED, *PLAIN], ids=str)
@pytest.mark.parametrize("master", [*SCALED, FP32, BF16], ids=str)
def test_a_copy_holds_the_parameter_s_values(fmt, master):
    p = parameter(fmt)
    copy = make_master(p, master)
    values = p.dequantize(torch.float32) if fmt.scaled else p.detach().float()
    if master.scaled:
        assert torch.equal(copy, ScalingTensor.quantize(values, master))
    else:
        assert copy.equal(values.to(master.dtype))
    assert not copy.requires_grad


@pytest.mark.parametrize("master", [FP16, FP32], ids=str)
def test_a_copy_may_start_from_what_the_parameter_was(master):
    values = make("normal", (16, 8))
    p = nn.Parameter(ScalingTensor.quantize(values, E4M3))
    copy = make_master(p, master, values)
    back = copy.dequantize() if master.scaled else copy
    assert (back - values).norm() < 1e-3 * values.norm() < (p.dequantize() - values).norm()


def test_a_master_never_shares_memory_with_its_parameter():
    p = nn.Parameter(torch.ones(4))
    make_master(p, FP32).add_(1.0)
    assert p.detach().eq(1).all()
