"""A cast that divides columns by powers of two, against the formula, and where that division is exact."""

import pytest
import torch

from helpers.numerics import codes, make
from msamp.kernels.reference.cast_columns import cast_columns
from msamp.numerics.formats import E4M3
from msamp.numerics.quantize import quantize


def test_it_is_the_definition_of_quantize_column_by_column():
    x, scale = make("log-normal", (33, 6)), torch.tensor([1.0, 2.0, 4.0, 64.0, 256.0, 0.5])
    payload = cast_columns(x, torch.tensor(8.0), scale, E4M3.dtype)
    for column, by in enumerate(scale.tolist()):
        assert codes(payload[:, column]).equal(codes(quantize(x[:, column], 8.0 / by, E4M3)))


def test_ones_change_no_code_of_an_fp8_weight():
    stored = quantize(make("normal", (16, 8)), 64.0, E4M3)
    assert codes(cast_columns(stored, None, torch.ones(8), E4M3.dtype)).equal(codes(stored))


def test_an_fp8_weight_is_divided_exactly_down_to_the_subnormals():
    stored = torch.tensor([[448.0, 4.0, 4.5, -1.75, 2.0**-9]]).to(E4M3.dtype)
    divided = cast_columns(stored, None, torch.full((5,), 256.0), E4M3.dtype)
    assert torch.equal(divided.float()[0, :2], stored.float()[0, :2] / 256)
    assert float((divided.float() - stored.float() / 256).abs().max()) <= 2.0**-10, "half the distance of subnormals"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_is_divided_exactly(dtype):
    x, by = make("channel-outlier", (12, 6)).to(dtype), torch.tensor([1.0, 2.0, 4.0, 64.0, 256.0, 1024.0])
    divided = cast_columns(x, None, by, dtype)
    assert divided.dtype == dtype
    assert torch.equal(divided, (x.double() / by).to(dtype))


def test_other_channel_scales_are_refused():
    with pytest.raises(ValueError, match=r"channel_scale is torch.float32 \(3,\); for \(2, 4\) it must be torch.float32 \(4,\)"):
        cast_columns(torch.ones(2, 4), None, torch.ones(3), E4M3.dtype)
