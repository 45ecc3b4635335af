"""Range expansion against the golden vectors, the formulas of COAT in FP64, and itself at the edges of FP32."""

import math

import pytest
import torch

from helpers.numerics import KINDS, LARGE, SMALL, bits, check, codes, floats, golden, make, measure, random_floats
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32
from msamp.numerics.granularity import TENSORWISE, Group
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.range_expand import STATE_GROUP, Expanded, dynamic_range, quantize_expanded, two_stage_amax

NAN, INF = float("nan"), float("inf")
FP8 = {"e4m3": E4M3, "e5m2": E5M2}
fp8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
kinds = pytest.mark.parametrize("kind", KINDS)
shapes = pytest.mark.parametrize("shape", [SMALL, LARGE], ids=str)


def same(a: Expanded, b: Expanded) -> bool:
    """Whether payload, max and k have the same bits."""
    return all(bits(x).equal(bits(y)) for x, y in ((a.payload, b.payload), (a.max, b.max), (a.k, b.k)))


# ------------------------------------------------------------------------------------------------------------- definition


@pytest.mark.parametrize("name", FP8)
def test_golden_groups(name, device):
    vectors = golden("coat")
    x = floats(vectors["x"]).to(device)
    stored = quantize_expanded(x, FP8[name], Group(vectors["group"]))
    groups = [group for group in vectors["groups"] if group["fmt"] == name]
    assert stored.max.tolist() == [float.fromhex(group["max"]) for group in groups]
    assert stored.k.tolist() == pytest.approx([group["k"] for group in groups], rel=1e-6)
    want = torch.tensor([group["codes"] for group in groups]).flatten()
    off = (codes(stored.payload) - want).abs()
    assert off.max() <= 1
    assert off.count_nonzero() <= 0.01 * len(off)
    first = slice(0, vectors["group"])
    assert sqnr_db(x[first], stored.dequantize()[first]) == pytest.approx(vectors["sqnr_db_first_group"][name], rel=1e-4)


@fp8
@kinds
def test_the_formulas_in_fp64(fmt, kind):
    x = make(kind, SMALL)
    stored = quantize_expanded(x, fmt)
    rows, largest = x.double().view(-1, 128), x.abs().amax(-1, keepdim=True).double()
    k = math.log(fmt.max / fmt.smallest) / (largest / rows.abs().amin(-1, keepdim=True)).log()
    assert stored.k.double().sub(k).abs().max() <= 1e-6 * k.max()
    expanded = rows.sign() * fmt.max * (rows.abs() / largest) ** k
    spacing = (expanded.abs().clamp(min=fmt.tiny).log2().floor() - fmt.mantissa_bits).exp2()
    assert ((stored.payload.double() - expanded).abs() <= 0.5001 * spacing).all()
    q = stored.payload.double()
    back = q.sign() * largest * (q.abs() / fmt.max) ** (1 / k)
    assert torch.allclose(stored.dequantize().double(), back, rtol=1e-5, atol=0)


@fp8
@kinds
def test_the_range_of_every_group_becomes_the_formats(fmt, kind):
    x = make(kind, LARGE)
    before, stored = dynamic_range(x), quantize_expanded(x, fmt)
    full = torch.full_like(before, fmt.max / fmt.smallest)
    assert not torch.allclose(before, full, rtol=0.5)
    assert dynamic_range(stored.payload.float()).equal(full)
    assert torch.allclose(dynamic_range(stored.dequantize()), before, rtol=1e-4)


@shapes
@kinds
@fp8
@pytest.mark.parametrize("what", ["expanded", "group 128"])
def test_loss_with_and_without_expansion(what, fmt, kind, shape, device):
    x = make(kind, shape, device=device)
    stored = quantize_expanded(x, fmt, expand=what == "expanded")
    check(what, fmt.name, kind, shape, measure(x, stored.dequantize(), stored.payload, fmt))


@fp8
def test_without_expansion_it_is_scaling_by_the_groups_maximum(fmt):
    x = make("normal", SMALL)
    stored = quantize_expanded(x, fmt, expand=False)
    assert stored.k.eq(1).all()
    scale = fmt.max / x.abs().amax(-1, keepdim=True)
    want = (x * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype)
    assert (codes(stored.payload) != codes(want)).float().mean() < 1e-3  # the same value in another order of operations
    assert quantize_expanded(x, fmt).payload.float().ne(stored.payload.float()).float().mean() > 0.5


@fp8
def test_narrow_ranges_gain_most(fmt):
    """Second moments as on COAT's page, of a range of about 1e1."""
    v = torch.rand(1 << 14, generator=torch.Generator().manual_seed(3)) * 0.9 + 0.1
    gain = sqnr_db(v, quantize_expanded(v, fmt).dequantize()) - sqnr_db(v, quantize_expanded(v, fmt, expand=False).dequantize())
    assert gain > 12


@fp8
@kinds
@pytest.mark.parametrize("exponent", [-60, -1, 7, 40])
def test_a_power_of_two_in_front_changes_only_the_maximum(fmt, kind, exponent):
    x, factor = make(kind, SMALL), 2.0**exponent
    one, other = quantize_expanded(x, fmt), quantize_expanded(x * factor, fmt)
    assert same(other, Expanded(one.payload, one.max * factor, one.k))
    assert other.dequantize().equal(one.dequantize() * factor)


@fp8
@kinds
def test_what_was_loaded_is_stored_as_it_was(fmt, kind):
    stored = quantize_expanded(make(kind, LARGE), fmt)
    again = quantize_expanded(stored.dequantize(), fmt)
    assert again.max.equal(stored.max)
    assert (codes(again.payload) != codes(stored.payload)).sum() <= 1e-4 * stored.payload.numel()


@fp8
def test_groups_are_apart_and_the_last_may_be_short(fmt):
    x = make("log-normal", (3, 100))
    parts = [quantize_expanded(part, fmt) for row in x for part in row.split(64)]
    whole = quantize_expanded(x, fmt, Group(64))
    joined = (torch.cat([getattr(part, name).flatten() for part in parts]) for name in ("payload", "max", "k"))
    assert [len(part.payload) for part in parts] == [64, 36] * 3
    assert same(whole, Expanded(*joined))
    assert whole.payload.shape == whole.dequantize().shape == x.shape
    assert whole.k.shape == (3, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_taken_as_their_fp32_values(dtype):
    x = make("normal", SMALL).to(dtype)
    assert same(quantize_expanded(x, E4M3), quantize_expanded(x.float(), E4M3))
    stored = quantize_expanded(x, E4M3)
    assert stored.dequantize(dtype).equal(stored.dequantize().to(dtype))


# -------------------------------------------------------------------------------------------------------------- the edges


@fp8
@pytest.mark.parametrize("value", [0.25, -3e-39, 3e38, -1.1, 2.0**-149])
def test_equal_magnitudes_take_no_exponent_and_come_back_exactly(fmt, value):
    x = torch.full((128,), value)
    x[::3] *= -1
    x[5] = 0
    stored = quantize_expanded(x, fmt)
    assert stored.k.tolist() == [1.0]
    assert stored.dequantize().equal(x)


@fp8
def test_zeros_stay_zero_and_keep_their_sign(fmt):
    x = torch.tensor([0.0, -0.0, 1e-30, -2.0])
    for values in (x, x[:2]):
        stored = quantize_expanded(values, fmt)
        assert bits(stored.dequantize()[:2]).equal(bits(x[:2]))
    assert stored.max.tolist() == [0.0]
    assert stored.k.tolist() == [1.0]


@fp8
def test_almost_equal_values_fill_the_range_and_come_back_to_the_last_bit_or_two(fmt):
    steps = torch.arange(128) % 5
    x = 0.7 + steps * 2.0**-24  # FP32's spacing there
    stored = quantize_expanded(x, fmt)
    assert dynamic_range(stored.payload.float()).tolist() == [fmt.max / fmt.smallest]
    assert (stored.dequantize() - x).abs().max() <= 2 * 2.0**-24


@fp8
@pytest.mark.parametrize(("low", "high"), [(2.0**-149, 3.4e38), (1e-45, 1.0), (1e-44, 1e-39), (1e-38, 1e38)])
def test_the_whole_range_of_fp32_in_one_group(fmt, low, high):
    generator = torch.Generator().manual_seed(1)
    share = torch.rand(128, generator=generator, dtype=torch.float64)
    x = (math.log(low) + share * (math.log(high) - math.log(low))).exp().float().clamp(low, high)
    x[0], x[1], x[2] = low, high, 0.0
    stored = quantize_expanded(x, fmt)
    back = stored.dequantize()
    assert back.isfinite().all()
    assert back[1] == x[1]
    worst = 2 ** (1 / stored.k.item())  # rounding changes a code by less than a factor of 2, at the subnormals
    assert ((back <= x * worst) & (back >= x / worst) | (x < high * 2.0**-125)).all()
    assert (back == 0).equal(x == 0)


@fp8
def test_no_random_bits_leave_the_range_or_vanish(fmt):
    x = random_floats(128 * 4000, seed=4)
    x = torch.where(x.isfinite(), x, 1.0)
    stored = quantize_expanded(x, fmt)
    back = stored.dequantize()
    assert stored.payload.float().isfinite().all()
    assert back.isfinite().all()
    assert stored.k.gt(0).all()
    assert back.ne(0).equal(x.ne(0))
    assert back.sign().equal(x.sign())


@fp8
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_group_with_anything_not_finite_loads_as_nan_and_the_others_as_ever(fmt, bad):
    x = make("normal", (4, 128))
    clean = quantize_expanded(x, fmt).dequantize()
    x[2, 7] = bad
    stored = quantize_expanded(x, fmt)
    hit = stored.group.amax(x) == INF
    assert stored.dequantize().isnan().equal(hit)
    assert stored.dequantize()[~hit].equal(clean[~hit])
    assert hit.sum() == stored.group.size


def test_an_empty_tensor():
    assert quantize_expanded(torch.empty(0, 4), E4M3).dequantize().shape == (0, 4)


@pytest.mark.parametrize("fmt", [FP16, BF16, FP32], ids=str)
def test_other_formats_are_refused(fmt):
    with pytest.raises(ValueError, match=f"{fmt} is not defined; choose fp8-e4m3 or fp8-e5m2"):
        quantize_expanded(torch.ones(2), fmt)


def test_it_takes_no_part_in_autograd():
    x = torch.randn(4, requires_grad=True)
    assert not quantize_expanded(x, E4M3).dequantize().requires_grad


@pytest.mark.promise("Group scaling", "The two-stage amax equals the tensor's to the bit; NaN and infinity show in it.")
@pytest.mark.parametrize("size", [1, 16, 128])
@pytest.mark.parametrize("shape", [(6, 32), (5, 77), (0,), ()])
def test_the_amax_in_two_stages_is_that_of_the_tensor(size, shape, device):
    x = make("log-normal", shape, device=device).bfloat16()
    maxima, amax = two_stage_amax(x, Group(size))
    assert maxima.shape == Group(size).groups(shape)
    assert amax.equal(TENSORWISE.amax(x))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_the_amax_in_two_stages_sees_what_is_not_finite(bad):
    x = torch.ones(40)
    x[17] = bad
    assert two_stage_amax(x, Group(16))[1] == INF


def test_dynamic_range_by_hand():
    x = torch.zeros(4, 4)
    x[0], x[1, 1], x[2], x[3] = torch.tensor([-8.0, 0, 2, 4]), 3.0, torch.tensor([1.0, NAN, 1, 1]), torch.tensor([3e38, 2.0**-149, 1, 0])
    found = dynamic_range(torch.cat([x, torch.zeros(1, 4)]), Group(4))
    assert found.dtype == torch.float64
    found = found.flatten()
    assert found[:2].tolist() == [4.0, 1.0]
    assert found[3] == pytest.approx(3e38 * 2.0**149, rel=1e-6)
    assert found.isnan().tolist() == [False, False, True, False, True]
    assert STATE_GROUP.size == 128
