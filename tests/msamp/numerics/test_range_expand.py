"""Range expansion against the golden vectors, the formulas of COAT in FP64, and itself at the edges of FP32."""

import math

import pytest
import torch

from helpers.choices import each_value
from helpers.numerics import KINDS, LARGE, SMALL, bits, check, codes, floats, golden, make, measure
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.granularity import TENSORWISE, Group
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.range_expand import Expanded, dynamic_range, quantize_expanded

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


@each_value(shape=[SMALL, LARGE], kind=KINDS, fmt=[E4M3, E5M2], what=["expanded", "group 128"])
def test_loss_with_and_without_expansion(what, fmt, kind, shape, device):
    x = make(kind, shape, device=device)
    stored = quantize_expanded(x, fmt, expand=what == "expanded")
    check(what, fmt.name, kind, shape, measure(x, stored.dequantize(), stored.payload, fmt))


@each_value(fmt=[E4M3, E5M2], kind=KINDS, exponent=[-60, -1, 7, 40])
def test_a_power_of_two_in_front_changes_only_the_maximum(fmt, kind, exponent):
    x, factor = make(kind, SMALL), 2.0**exponent
    one, other = quantize_expanded(x, fmt), quantize_expanded(x * factor, fmt)
    assert same(other, Expanded(one.payload, one.max * factor, one.k))
    assert other.dequantize().equal(one.dequantize() * factor)


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


# -------------------------------------------------------------------------------------------------------------- the edges


@each_value(fmt=[E4M3, E5M2], value=[0.25, -3e-39, 3e38, -1.1, 2.0 ** (-149)])
def test_equal_magnitudes_take_no_exponent_and_come_back_exactly(fmt, value):
    x = torch.full((128,), value)
    x[::3] *= -1
    x[5] = 0
    stored = quantize_expanded(x, fmt)
    assert stored.k.tolist() == [1.0]
    assert stored.dequantize().equal(x)


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
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_group_with_anything_not_finite_loads_as_nan_and_the_others_as_ever(fmt, bad):
    x = make("normal", (4, 128))
    clean = quantize_expanded(x, fmt).dequantize()
    x[2, 7] = bad
    stored = quantize_expanded(x, fmt)
    hit = stored.group.spread(stored.group.maxima(x), x.shape) == INF
    assert stored.dequantize().isnan().equal(hit)
    assert stored.dequantize()[~hit].equal(clean[~hit])
    assert hit.sum() == stored.group.size


@pytest.mark.promise("Group scaling", "The two-stage amax equals the tensor's to the bit; NaN and infinity show in it.")
@each_value(size=[1, 16, 128], shape=[(6, 32), (5, 77), (0,), ()])
def test_the_amax_in_two_stages_is_that_of_the_tensor(size, shape, device):
    x = make("log-normal", shape, device=device).bfloat16()
    assert TENSORWISE.amax(Group(size).maxima(x)).equal(TENSORWISE.amax(x))


def test_one_tiny_element_costs_its_group():
    """docs/reference/numbers.md: mean errors of values over a factor of ten, with an element of 1e-12 among them, without expansion."""
    x = 10.0 ** -torch.linspace(0, 1, 128)
    tiny = x.clone()
    tiny[64] = 1e-12
    others = torch.arange(128) != 64
    errors = [
        float(((quantize_expanded(value, E4M3, expand=expand).dequantize() - value).abs() / value)[others].mean())
        for value, expand in ((x, True), (tiny, True), (x, False))
    ]
    assert errors == [pytest.approx(want, rel=0.1) for want in (0.007, 0.050, 0.024)]
