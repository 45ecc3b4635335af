import pytest
import torch

from helpers.numerics import codes, make
from msamp.kernels.reference.cast import cast
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.quantize import quantize


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
