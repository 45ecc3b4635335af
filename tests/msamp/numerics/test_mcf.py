"""Pairs of BF16 against exact rational arithmetic and the golden vectors."""

from fractions import Fraction

import pytest
import torch

from helpers.numerics import bits, every_bf16, floats, golden
from msamp.numerics import mcf
from msamp.numerics.metrics import sqnr_db

COUNT = 110_000
every_count = pytest.mark.parametrize("count", [20_000, pytest.param(170_000, marks=pytest.mark.nightly(4))])


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).bfloat16()


def random_pairs(count: int = COUNT, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Any two finite BF16, subnormals and zeros among them."""
    finite = every_bf16()[every_bf16().isfinite()]
    a, b = torch.randint(len(finite), (2, count), generator=torch.Generator().manual_seed(seed))
    return finite[a], finite[b]


def close_pairs(count: int = COUNT, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Magnitudes within a few binades of each other, random signs: where sums cancel and digits carry."""
    a, b = torch.randn(2, count, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return a, b


def remainders(x: torch.Tensor, seed: int) -> torch.Tensor:
    """BF16 up to half a unit in the last place of `x`."""
    return (x.float() * torch.empty(len(x)).uniform_(-(2**-8), 2**-8, generator=torch.Generator().manual_seed(seed))).bfloat16()


def fractions(x: torch.Tensor) -> list[Fraction]:
    return [Fraction(value) for value in x.tolist()]


def larger_first(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    swap = a.abs() < b.abs()
    return torch.where(swap, b, a), torch.where(swap, a, b)


def assert_exact(exact: list[Fraction], pair: mcf.Pair) -> None:
    got = [x + y for x, y in zip(*map(fractions, pair), strict=True)]
    assert got == exact


@every_count
@pytest.mark.parametrize("pairs", [random_pairs, close_pairs])
def test_sums_are_exact_for_random_pairs(pairs, count):
    a, b = pairs(count)
    finite = (a + b).isfinite()
    a, b = a[finite], b[finite]
    assert len(a) > 0.9 * count
    exact = [x + y for x, y in zip(fractions(a), fractions(b), strict=True)]
    x, y = mcf.two_sum(a, b)
    assert_exact(exact, (x, y))
    assert (x + y).equal(x)  # the second component is below the first's last digit
    fast = mcf.fast_two_sum(*larger_first(a, b))
    assert fast[0].equal(x)
    assert fast[1].equal(y)


def split(a: torch.Tensor) -> mcf.Pair:
    """Dekker's Split: (high, low) of at most 4 binary digits each, high + low = a exactly, |a| < 2^123 (beyond, 17 a overflows)."""
    scaled = a * 17.0
    high = scaled - (scaled - a)
    return high, a - high


def two_product_dekker(a: torch.Tensor, b: torch.Tensor) -> mcf.Pair:
    """TwoProd by Split, 17 operations that never leave BF16: another definition of `two_product`, within Split's range and for
    |a b| < 2^127."""
    x = a * b
    (a_high, a_low), (b_high, b_low) = split(a), split(b)
    return x, ((a_high * b_high - x) + a_high * b_low + a_low * b_high) + a_low * b_low


@every_count
@pytest.mark.parametrize("pairs", [random_pairs, close_pairs])
def test_products_are_exact_for_random_pairs(pairs, count):
    a, b = pairs(count)
    x = a * b
    kept = x.isfinite() & ((x.abs() >= 2.0**-118) | (a == 0) | (b == 0))
    a, b = a[kept], b[kept]
    assert len(a) > 0.6 * count
    exact = [x * y for x, y in zip(fractions(a), fractions(b), strict=True)]
    assert_exact(exact, mcf.two_product(a, b))
    narrow = ((a * b).abs() < 2.0**127) & (a.abs() < 2.0**123) & (b.abs() < 2.0**123)
    assert two_product_dekker(a[narrow], b[narrow])[1].equal(mcf.two_product(a[narrow], b[narrow])[1])


def test_golden_mcf():
    vectors = golden("mcf")
    a, b, big, small, y, z = (floats(vectors[key]).bfloat16() for key in ("a", "b", "A", "B", "Y", "Z"))
    for key, (first, second) in {
        "two_sum": mcf.two_sum(a, b),
        "fast_two_sum": mcf.fast_two_sum(*larger_first(a, b)),
        "grow_A_Y_by_B": mcf.grow((big, y), small),
        "mul_AY_BZ": mcf.mul((big, y), (small, z)),
    }.items():
        want = [floats(component).bfloat16() for component in vectors[key]]
        assert bits(first).equal(bits(want[0])), key
        assert bits(second).equal(bits(want[1])), key
    for value, pair in vectors["expansions"].items():
        assert [component.item() for component in mcf.expansion(float(value))] == pair


@pytest.mark.parametrize("add", [mcf.fast_two_sum, mcf.two_sum])
def test_grow_errs_by_at_most_2_to_the_minus_15(add):
    a, b = close_pairs()
    x, y = mcf.fast_two_sum(a, remainders(a, seed=2))
    if add is mcf.fast_two_sum:
        kept = x.abs() >= b.abs()
        x, y, b = x[kept], y[kept], b[kept]
    u, v = mcf.grow((x, y), b, add)
    error = (u.double() + v.double() - (x.double() + y.double() + b.double())).abs()
    assert (error <= 2.0**-15 * torch.maximum(x.abs(), b.abs()).double()).all()
    assert (u + v).equal(u)
    nothing = torch.zeros_like(x)
    assert mcf.grow((x, nothing), b, add)[0].equal(x + b)  # what BF16 alone would give


def test_mul_errs_by_less_than_2_to_the_minus_13():
    a, b = close_pairs()
    first, second = (mcf.fast_two_sum(x, remainders(x, seed)) for seed, x in enumerate((a, b)))
    p, e = mcf.mul(first, second)
    exact = (first[0].double() + first[1].double()) * (second[0].double() + second[1].double())
    assert ((p.double() + e.double() - exact).abs() <= 2.0**-13 * exact.abs()).all()
    assert (p + e).equal(p)


# Remainders in E4M3


def halves(x: torch.Tensor) -> torch.Tensor:
    """FP64: half a unit in the last place of BF16, from the distance to the next number."""
    beyond = (x.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(beyond.isfinite(), (beyond.double() - x.double()).abs() / 2, 2.0**119)


def finite() -> torch.Tensor:
    return every_bf16()[every_bf16().isfinite()]


def loaded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mcf.load_pair(x, mcf.remainder_payload((x, y), torch.float8_e4m3fn))[1]


@pytest.mark.parametrize(
    "share", [-1.0, -0.999, -0.97, -0.9, -0.6, -0.26, -(2.0**-9), 0.0, 2.0**-14, 0.01, 0.3, 0.5, 0.93, 0.969, 0.98, 1.0]
)
def test_an_8_bit_remainder_leaves_the_first_component_the_rounded_sum(share):
    """All finite first components: the nearest of E4M3's 4 digits, never so large that x + y would round to another x."""
    x = finite()
    y = (halves(x) * share).bfloat16()
    normal = x + y == x
    x, y = x[normal], y[normal]
    got = loaded(x, y)
    assert (x + got).equal(x)
    error = (got.double() - y.double()).abs()
    at_the_limit = y.double().abs() > 0.96 * halves(x)
    assert (error <= 2.0**-4 * y.double().abs()).all()
    assert (error[~at_the_limit] <= 2.0**-5 * 2.0 ** torch.frexp(y.double().abs())[1].double()[~at_the_limit]).all()
    assert loaded(x, got).equal(got)


def test_half_a_unit_is_a_tie_which_only_an_even_first_component_wins():
    for x, y in ((1.0, 2.0**-8), (1.015625, -(2.0**-8)), (-1.015625, 2.0**-8 * 0.99)):
        assert abs(loaded(bf16(x), bf16(y)).item()) == 2.0**-8
    for y in (2.0**-8 * 0.99, -(2.0**-8) * 0.99, 2.0**-7):
        assert loaded(bf16(1.0078125), bf16(y)).item() == pytest.approx(15 / 16 * 2.0**-8 * (1 if y > 0 else -1), abs=0)
    assert (bf16(1.0078125) + bf16(2.0**-8)).item() != bf16(1.0078125).item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_8_bit_remainder_keeps_nan_and_saturates(bad):
    x = bf16(bad, 1.0)
    got = loaded(x, bf16(bad, bad))
    assert got.isnan().equal(bf16(bad, bad).isnan())
    assert got[1].isnan() or got[1].abs() == 2.0**-8
    assert (x + got)[0].isnan() == x[0].isnan()


def test_what_e4m3_costs():
    """dB of normal numbers as x alone, with a remainder in E4M3, and in BF16."""
    values = torch.randn(COUNT, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x = values.bfloat16()
    y = (values - x.double()).float()
    assert sqnr_db(values, x.double()) == pytest.approx(55.6, abs=0.5)
    assert sqnr_db(values, x.double() + loaded(x, y).double()) == pytest.approx(87.0, abs=1.0)
    assert sqnr_db(values, x.double() + y.bfloat16().double()) == pytest.approx(112.2, abs=0.5)
