"""The cast in groups: against the definition group by group, its inverse, and group scaling's two stages."""

import pytest
import torch

from helpers.choices import every_pair
from helpers.numerics import KINDS, LARGE, SMALL, check, make, measure
from msamp.kernels.reference.amax import amax
from msamp.kernels.reference.group_cast import NOT_FINITE, group_cast, group_decode
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.granularity import Group
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import inverse, scale_from_amax

every_fp8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)


@every_fp8
@pytest.mark.parametrize("shape", [(3, 40), (2, 16), (1, 1), (0, 16)], ids=str)
def test_each_group_is_a_tensor_cast_just_in_time(fmt, shape):
    x = make("log-normal", shape)
    payload, exponents = group_cast(x, 16, fmt.dtype)
    decoded = group_decode(payload, exponents, 16, torch.float32)
    assert exponents.shape == (shape[0], -(-shape[1] // 16))
    for i in range(shape[0]):
        for k in range(exponents.shape[1]):
            piece = x[i, 16 * k : 16 * k + 16]
            scale = scale_from_amax(piece.abs().amax(), fmt.max)
            assert 2.0 ** (int(exponents[i, k]) - 127) == inverse(scale)
            assert decoded[i, 16 * k : 16 * k + 16].equal(dequantize(quantize(piece, scale, fmt), inverse(scale)))


@every_pair
@every_fp8
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_keeps_the_limits_of_groups_of_16(fmt, shape, kind):
    x = make(kind, shape)
    payload, exponents = group_cast(x, 16, fmt.dtype)
    check("group 16", str(fmt), kind, shape, measure(x, group_decode(payload, exponents, 16, torch.float32), payload, fmt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_was_kept_is_kept_again_to_the_same_bits(dtype):
    x = make("normal", SMALL).to(dtype)
    kept = group_decode(*group_cast(x, 16, E4M3.dtype), 16, dtype)
    assert kept.dtype == dtype
    assert kept.equal(group_decode(*group_cast(kept, 16, E4M3.dtype), 16, dtype))


@every_fp8
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_group_that_is_not_finite_comes_back_as_nan_and_its_neighbours_do_not(fmt, bad):
    x = make("normal", (2, 32))
    x[1, 17] = bad
    payload, exponents = group_cast(x, 16, fmt.dtype)
    decoded = group_decode(payload, exponents, 16, torch.float32)
    assert exponents[1, 1] == NOT_FINITE
    assert decoded.isnan().nonzero().tolist() == [[1, i] for i in range(16, 32)]


def test_zeros_and_the_ends_of_the_range():
    x = torch.zeros(4, 16)
    x[1, 3], x[2, 3], x[3, 3] = 2.0**-149, 3.1e38, -(2.0**-120)
    payload, exponents = group_cast(x, 16, E4M3.dtype)
    assert exponents.view(-1)[:2].tolist() == [127, 1]
    decoded = group_decode(payload, exponents, 16, torch.float32)
    assert decoded[0].count_nonzero() == 0
    assert decoded[2, 3] == pytest.approx(3.1e38, rel=2**-4)
    assert decoded[3, 3] == x[3, 3]


@pytest.mark.parametrize("size", [1, 2, 16, 64, 512])
def test_the_largest_of_the_groups_is_the_amax_of_the_tensor(size):
    x = make("channel-outlier", (32, 100))
    assert Group(size).maxima(x).amax() == amax(x)


@pytest.mark.parametrize(
    ("shape", "size", "what"), [((4,), 16, "a cast with groups"), ((4, 4), 12, "power of two"), ((4, 4), 0, "power of")]
)
def test_what_does_not_fit_is_refused(shape, size, what):
    with pytest.raises(ValueError, match=what):
        group_cast(torch.zeros(shape), size, E4M3.dtype)
    with pytest.raises(ValueError, match=what):
        group_decode(torch.zeros(shape).to(E4M3.dtype), torch.zeros(shape, dtype=torch.uint8), size, torch.float32)
