"""The cast in both layouts: by the definition, with and without a scale, and everything it can leave out."""

import itertools

import pytest
import torch

from helpers.choices import every_pair
from helpers.numerics import KINDS, SMALL, bits, check, codes, make, measure
from msamp.kernels.reference.amax import amax
from msamp.kernels.reference.cast import cast
from msamp.kernels.reference.cast_transpose import cast_columns, cast_transpose, cast_transposed, transpose
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.granularity import Group
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import inverse, scale_from_amax

FLAGS = ("row", "col", "colsum")
every_fp8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)


@every_fp8
@pytest.mark.parametrize("shape", [(33, 17), (16, 16), (1, 5), (0, 16)], ids=str)
def test_both_layouts_hold_the_cast(fmt, shape):
    x, slot = make("normal", shape), torch.tensor(0.5)
    y, y_t, scale_inv, sums = cast_transpose(x, torch.tensor(4.0), slot, fmt.dtype, row=True, col=True, colsum=True)
    want = cast(x, torch.tensor(4.0), fmt.dtype)
    assert (y.shape, y_t.shape) == (shape, shape[::-1])
    assert y.is_contiguous()
    assert y_t.is_contiguous()
    assert codes(y).equal(codes(want))
    assert codes(y_t).equal(codes(want).t())
    assert slot == max(0.5, float(amax(x)))
    assert scale_inv == 0.25
    torch.testing.assert_close(sums.sum(0), x.double().sum(0).float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("asked", list(itertools.product([False, True], repeat=3)), ids=str)
def test_what_is_not_asked_for_is_empty(asked):
    x = make("normal", (6, 10))
    if asked == (False, False, True):
        with pytest.raises(ValueError, match="colsum requires row or col"):
            cast_transpose(x, None, None, E4M3.dtype, **dict(zip(FLAGS, asked, strict=True)))
        return
    y, y_t, _, sums = cast_transpose(x, None, None, E4M3.dtype, **dict(zip(FLAGS, asked, strict=True)))
    assert [out.numel() for out in (y, y_t, sums)] == [60 * asked[0], 60 * asked[1], 10 * asked[2]]
    assert [out.dtype for out in (y, y_t, sums)] == [E4M3.dtype, E4M3.dtype, torch.float32]


@every_fp8
@pytest.mark.parametrize("kind", KINDS)
def test_just_in_time_keeps_the_limits_of_a_cast(fmt, kind):
    x = make(kind, SMALL)
    y, _, scale_inv, _ = cast_transpose(x, None, None, fmt.dtype, row=True)
    assert scale_inv == inverse(scale_from_amax(x.abs().amax(), fmt.max))
    check("cast", str(fmt), kind, SMALL, measure(x, dequantize(y, scale_inv), y, fmt))


@every_pair
@every_fp8
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [None, float("nan"), -float("inf")])
def test_an_amax_in_two_stages_changes_no_bit(fmt, kind, bad):
    x = make(kind, (24, 40)).bfloat16()
    x[7, 3] = x[7, 3] if bad is None else bad
    slots = torch.zeros(()), torch.zeros(())
    want = cast_transpose(x, None, slots[0], fmt.dtype, row=True, col=True, colsum=True)
    for group in (Group(16), Group(40)):
        maxima = group.maxima(x)
        got = cast_transpose(x, None, slots[1], fmt.dtype, row=True, col=True, colsum=True, maxima=maxima)
        assert all(codes(a).equal(codes(b)) for a, b in zip(got[:2], want[:2], strict=True))
        assert all(bits(a).equal(bits(b)) for a, b in zip((*got[2:], slots[1]), (*want[2:], slots[0]), strict=True))


@every_pair
@every_fp8
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scale", [None, 2.0])
def test_what_is_not_finite_shows_in_scale_inv_and_slot(fmt, bad, scale):
    x, slot = make("normal", (8, 8)), torch.zeros(())
    x[3, 4] = bad
    scale = None if scale is None else torch.tensor(scale)
    assert cast_transpose(x, scale, slot, fmt.dtype, row=True)[2].isnan()
    assert slot.isinf()


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("bad", [1.0, float("inf")])
def test_scale_inv_is_left_in_its_slot(bad, scale):
    x, slot = make("normal", (8, 8)), torch.zeros(())
    x[3, 4] = bad
    scale = None if scale is None else torch.tensor(scale)
    want = cast_transpose(x, scale, None, E4M3.dtype, row=True)[2]
    assert cast_transpose(x, scale, None, E4M3.dtype, row=True, scale_inv_slot=slot)[2].numel() == 0
    assert bits(slot).equal(bits(want))


@every_fp8
def test_the_transpose_alone_has_the_same_codes(fmt):
    x = make("log-normal", (33, 17)).bfloat16()
    y, _, scale_inv, _ = cast_transpose(x, None, None, fmt.dtype, row=True)
    y_t = cast_transposed(x, scale_inv, fmt.dtype)
    assert y_t.is_contiguous()
    assert codes(y_t).equal(codes(y).t())


def test_column_sums_of_half_precision_are_taken_in_fp32():
    x = torch.ones(5000, 3, dtype=torch.bfloat16)
    assert cast_transpose(x, None, None, E5M2.dtype, row=True, colsum=True)[3].tolist() == [[5000.0] * 3]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_every_code_goes_to_its_place(fmt):
    x = torch.arange(256, dtype=torch.uint8).view(8, 32).view(fmt.dtype)
    turned = transpose(x)
    assert (turned.dtype, turned.shape, turned.is_contiguous()) == (fmt.dtype, (32, 8), True)
    assert codes(turned).equal(codes(x).t())


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
