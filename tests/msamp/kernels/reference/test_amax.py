import pytest
import torch

from msamp.kernels.reference.amax import amax


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
