"""The transpose of a payload: every code, every place."""

import pytest
import torch

from helpers.numerics import codes
from msamp.kernels.reference.transpose import transpose
from msamp.numerics.formats import E4M3, E5M2


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_every_code_goes_to_its_place(fmt):
    x = torch.arange(256, dtype=torch.uint8).view(8, 32).view(fmt.dtype)
    turned = transpose(x)
    assert (turned.dtype, turned.shape, turned.is_contiguous()) == (fmt.dtype, (32, 8), True)
    assert codes(turned).equal(codes(x).t())


@pytest.mark.parametrize("x", [torch.zeros(4, 4), torch.zeros(2, 3, 4, dtype=torch.uint8)], ids=["float32", "3-d"])
def test_other_tensors_are_refused(x):
    with pytest.raises(ValueError, match=rf"payload is \({x.shape[0]}, .*cast_transpose"):
        transpose(x)
