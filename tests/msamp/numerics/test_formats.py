import pytest
import torch

from msamp.numerics import formats
from msamp.numerics.quantize import quantize


@pytest.mark.parametrize("fmt", formats.ALL, ids=str)
def test_limits_are_those_of_the_dtype(fmt):
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max
    assert fmt.tiny == info.smallest_normal
    assert 2.0**-fmt.mantissa_bits == info.eps
    assert fmt.smallest == info.smallest_normal * info.eps
    assert fmt.bytes == info.bits // 8


@pytest.mark.parametrize(("fmt", "payload"), [(formats.COAT_E4M3, formats.E4M3), (formats.COAT_E5M2, formats.E5M2)], ids=str)
def test_coat_s_formats_are_fp8_with_two_numbers_a_group_of_a_row(fmt, payload):
    assert (fmt.dtype, fmt.max, fmt.smallest, fmt.scaled) == (payload.dtype, payload.max, payload.smallest, False)
    assert fmt.bytes_of((64, 256)) == 64 * 256 * (1 + 8 / 128)
    assert [fmt.bytes_of(shape) for shape in ((2, 3, 129), (5,), (), (0, 7))] == [6 * (129 + 16), 5 + 8, 1 + 8, 0]
    assert [payload.bytes_of(shape) for shape in ((2, 3, 129), ())] == [6 * 129, 1]
    assert formats.by_name(fmt.name) is fmt
    assert formats.of_dtype(fmt.dtype) is payload


@pytest.mark.parametrize("fmt", [formats.E4M3, formats.E5M2], ids=str)
def test_the_gain_gives_rounded_values_the_slope_1(fmt):
    normal = torch.special.ndtri((torch.arange(1 << 20).double() + 0.5) / (1 << 20))
    for values in (normal, 1.3 * normal, (normal / 2).exp()):
        slope = float((quantize(values, 1.0, fmt).double() * values).sum() / values.square().sum())
        assert abs(slope * fmt.gain - 1) < 0.15 * (fmt.gain - 1), slope


def test_an_unknown_name_lists_those_accepted():
    with pytest.raises(ValueError, match=r"'fp4'.*fp32, bf16, fp16, fp8-e4m3, fp8-e5m2, coat-e4m3, coat-e5m2"):
        formats.by_name("fp4")
