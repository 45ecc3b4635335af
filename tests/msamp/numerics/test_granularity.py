import pytest
import torch

from msamp.numerics.formats import E4M3
from msamp.numerics.granularity import TENSORWISE, Tensorwise
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import inverse, scale_from_amax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_is_the_largest_magnitude(dtype, device):
    x = torch.randn(37, 19, device=device).to(dtype)
    x[3, 4] = -50.0
    amax = TENSORWISE.amax(x)
    assert amax.dtype == torch.float32
    assert amax.shape == ()
    assert amax.device.type == device.type
    assert amax == 50.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_anything_not_finite_becomes_infinity(bad, device):
    x = torch.randn(33, 5, device=device)
    x[7, 2] = bad
    assert TENSORWISE.amax(x) == float("inf")


@pytest.mark.parametrize("shape", [(0,), (0, 7), (4, 0)])
def test_an_empty_tensor_has_amax_zero(shape):
    amax = TENSORWISE.amax(torch.empty(shape))
    assert amax.shape == ()
    assert amax == 0


def test_the_smallest_subnormal_is_seen():
    assert TENSORWISE.amax(torch.tensor([0.0, -(2.0**-149)])) == 2.0**-149


def test_it_takes_no_part_in_autograd():
    x = torch.randn(3, requires_grad=True)
    assert not TENSORWISE.amax(x).requires_grad


def test_all_tensorwise_are_one():
    assert Tensorwise() == TENSORWISE
    assert hash(Tensorwise()) == hash(TENSORWISE)
    assert TENSORWISE != "tensorwise"
    assert repr(TENSORWISE) == "tensorwise"


class Rowwise:
    """What a further granularity brings: nothing but its amax."""

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax(-1, keepdim=True)


def test_another_granularity_enters_by_its_amax_alone():
    x = torch.randn(8, 32) * 10.0 ** torch.arange(-4, 4).view(8, 1)
    scale = scale_from_amax(Rowwise().amax(x), E4M3.max)
    rows = dequantize(quantize(x, scale, E4M3), inverse(scale))
    relative = ((rows - x).norm(dim=-1) / x.norm(dim=-1)).max()
    assert scale.shape == (8, 1)
    assert relative < 0.04
