import pytest
import torch
from numerics import codes, make

from msamp.kernels.reference.cast import cast
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.quantize import quantize


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_definition_of_quantize(fmt, dtype):
    x = make("log-normal", (33, 17)).to(dtype)
    y = cast(x, torch.tensor(8.0), None, fmt.dtype)
    assert y.dtype == fmt.dtype
    assert codes(y).equal(codes(quantize(x, 8.0, fmt)))


def test_the_slot_is_raised_never_lowered():
    slot = torch.tensor(2.0)
    for amax, want in ((1.0, 2.0), (-5.0, 5.0), (3.0, 5.0)):
        cast(torch.full((2, 3), amax), torch.ones(()), slot, E4M3.dtype)
        assert slot == want


def test_the_slot_takes_the_amax_of_what_comes_in_not_of_the_product():
    slot = torch.zeros(())
    cast(torch.full((2, 3), 4.0), torch.tensor(64.0), slot, E4M3.dtype)
    assert slot == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_slot_shows_what_is_not_finite(bad):
    slot = torch.tensor(7.0)
    cast(torch.tensor([[1.0, bad]]), torch.ones(()), slot, E4M3.dtype)
    assert slot == float("inf")


def test_the_payload_is_row_major_whatever_comes_in():
    x = make("normal", (5, 8)).t()
    y = cast(x, torch.ones(()), None, E4M3.dtype)
    assert y.shape == (8, 5)
    assert y.is_contiguous()
    assert codes(y).equal(codes(quantize(x.contiguous(), 1.0, E4M3)))
