"""Hopper's sums of FP8 products: by hand, against bits that an H200 recorded, and against another implementation."""

import itertools
import json

import pytest
import torch

from helpers.fp8_sums import CASES, E4M3, E5M2, FILE, ROWS, SCALE_INVS, defined, digest, operands, summed, values
from msamp.kernels import ops
from msamp.numerics.accumulation import accumulating, judge_sums, product, tally_grouped_, tally_product_

ONE = torch.ones(())


def row(*numbers: float, dtype=E4M3) -> torch.Tensor:
    return torch.tensor([numbers]).to(dtype)


def test_products_are_cut_13_bits_below_the_largest_of_their_block():
    large, below = 2.0**8, 2.0**-6
    assert product(row(large, 1.0), row(1.0, 2.0**-5), "fast") == large + 2.0**-5  # 13 bits below
    assert product(row(large, 1.5, -1.5), row(1.0, 2.0**-5, 2.0**-5), "fast") == large  # both cut to 2^-5, toward zero
    assert product(row(large, 1.0), row(1.0, below), "fast") == large
    one_by_one = row(large, *[1.0] * 40)
    assert product(one_by_one, row(1.0, *[below] * 40), "fast") == large  # also in the next block, where the sum is the largest
    assert product(one_by_one, row(1.0, *[below] * 40), "exact") == large + 40 * below


def test_full_accumulation_promotes_after_128_products():
    a, b = row(2.0**8, *[1.0] * 255), row(1.0, *[2.0**-6] * 255)
    assert product(a, b, "fast") == 2.0**8
    assert product(a, b, "full") == 2.0**8 + 128 * 2.0**-6


@pytest.mark.parametrize(("dtype", "exponent"), [(E4M3, -6), (E5M2, -14)], ids=str)
def test_a_subnormal_number_has_the_smallest_exponent(dtype, exponent):
    """So 2^(exponent - 2) aligns like 2^exponent, and what is 13 bits below that is cut."""
    a, b = row(2.0 ** (exponent - 2), 2.0 ** (exponent + 1), dtype=dtype), row(2.0**8, 2.0**-8)
    assert product(a, b, "fast") == 2.0 ** (exponent + 6)
    assert product(row(1.0, 1.0), row(2.0**-9, 0.0), "fast") == 2.0**-9


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_have_the_bits_of_an_h200(case):
    recorded = json.loads(FILE.read_text())
    assert [digest(x.view(torch.uint8)) for x in operands(case)] == recorded["inputs"][str(case)], "other inputs than were recorded"
    rows = [row for row in recorded["cublas"] if row["case"] == str(case)]
    grouped = [row for row in recorded["grouped"] if row["case"] == str(case)]
    assert len(rows) == 4
    for fast in (True, False):
        assert {row["sha256"] for row in grouped if row["fast"] == fast} <= {digest(summed(case, fast))}
        for row in (row for row in rows if row["fast"] == fast):
            got = defined(case, fast, getattr(torch, row["out"]), row["pieces"])
            assert values(got) == row["first"]
            assert digest(got) == row["sha256"]
            if case.K <= 1024:
                with accumulating("hopper"):
                    twin = ops.scaled_mm(*operands(case), *map(torch.tensor, SCALE_INVS), None, got.dtype, fast_accum=fast)
                assert digest(twin) == row["sha256"]


def test_values_that_are_not_finite_follow_ieee():
    a, b = row(1.0, float("inf"), 0.0, dtype=E5M2), row(1.0, -2.0, 3.0)
    assert product(a, b, "full") == float("-inf")
    assert product(a, row(1.0, 0.0, 3.0), "full").isnan()


def test_leading_dimensions_broadcast():
    a, b = (operands(CASES[0])[i].view(4, 8, 128) for i in (0, 1))
    got = product(a.view(2, 2, 8, 128)[:, :1], b.view(2, 2, 8, 128), "fast")
    assert got[1, 0].equal(product(a[2], b[2], "fast"))
    assert got[0, 1].equal(product(a[0], b[1], "fast"))


@pytest.mark.parametrize("case", CASES[7:10], ids=str)
@pytest.mark.parametrize("fast", [True, False])
def test_twins_sum_like_hopper_when_asked_to(fast, case):
    a, b = (x[:16] for x in operands(case))
    want = product(a, b, "fast" if fast else "full")
    offsets, long = (torch.tensor([n], dtype=torch.int32) for n in (16, a.shape[1]))

    def twins() -> list[torch.Tensor]:
        return [
            ops.scaled_mm(a, b, ONE, ONE, None, torch.float32, fast_accum=fast),
            ops.grouped_mm(a, b[None], offsets, ONE, ONE[None], torch.float32, fast_accum=fast),
            ops.grouped_mm_grad_weight(a, b, long, ONE, ONE, torch.float32, fast_accum=fast)[0],
        ]

    with accumulating("hopper"):
        assert all(got.equal(want) for got in twins())
    assert not any(got.equal(want) for got in twins())


@pytest.mark.parametrize(
    ("case", "accumulation", "slope"), [(7, "fast", 0.9315), (7, "full", 0.9995), (8, "fast", 1.0), (9, "fast", 0.983)]
)
def test_a_sample_of_a_product_shows_how_its_sums_shrink(case, accumulation, slope):
    """Equal signs, one large product, a mean: all of 4,096 products."""
    a, b = operands(CASES[case])
    tally, bias = torch.zeros(3, dtype=torch.float64), torch.arange(32.0)
    tally_product_([tally], product(a, b, accumulation) * 0.5 + bias, a, b, torch.tensor(0.5), bias)
    got, sqnr = judge_sums(tally.tolist())
    assert got == pytest.approx(slope, abs=1e-3)
    assert (sqnr > 60) == (accumulation == "full" or case == 8)


@pytest.mark.parametrize(("fast", "slope"), [(True, 0.9315), (False, 0.9995)])
def test_a_sample_of_grouped_products_shows_how_their_sums_shrink(fast, slope):
    """4,096 products of equal signs, by the second of three experts; the first has no rows, the last rows of other sums."""
    a, b = operands(CASES[7])
    (rows, k), ends = a.shape, torch.tensor([0, len(a), len(a) + 16], dtype=torch.int32)
    a, weights = torch.cat([a, a[:16]]), torch.stack([b, b, b])
    scale_inv, factors = torch.tensor(0.5), torch.tensor([1.0, 2.0, 4.0])
    tokens = torch.tensor([0, k, k + 16], dtype=torch.int32)
    a_t, b_t = (torch.cat([x, x[:, :16]], 1) for x in (a[:rows], b))
    with accumulating("hopper"):
        outputs = ops.grouped_mm(a, weights, ends, scale_inv, factors, torch.float32, fast_accum=fast)
        gradients = ops.grouped_mm_grad_weight(a_t, b_t, tokens, scale_inv, factors[1], torch.float32, fast_accum=fast)
    tallies = torch.zeros(2, 3, dtype=torch.float64)
    tally_grouped_(tallies[:1], outputs, a, weights, ends, scale_inv * factors)
    tally_grouped_(tallies[1:], gradients, a_t, b_t, tokens, scale_inv * factors[1])
    assert [judge_sums(tally)[0] for tally in tallies.tolist()] == pytest.approx([slope, slope], abs=1e-3)
    tally_grouped_(tallies, outputs, a, weights, torch.zeros_like(ends), scale_inv * factors)  # no rows: nothing is counted
    assert [judge_sums(tally)[0] for tally in tallies.tolist()] == pytest.approx([slope, slope], abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("case", [case for case in CASES if case.size > ROWS or case.K <= 1024], ids=str)
def test_products_of_this_gpu_are_as_defined(case, fast):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the definition is Hopper's")
    a, b = (x.repeat(max(case.size, 128) // ROWS, 1).cuda() for x in operands(case))
    scales = [torch.tensor(scale, device="cuda") for scale in SCALE_INVS]
    got = ops.scaled_mm(a[: case.size], b[: case.size], *scales, None, torch.float32, fast_accum=fast)
    assert digest(got[:ROWS, :ROWS].cpu()) == digest(defined(case, fast, torch.float32))
    if not case.K % 128:
        one, ends = torch.ones((), device="cuda"), torch.tensor([len(a)], dtype=torch.int32, device="cuda")
        got = ops.grouped_mm(a, b[None], ends, one, one[None], torch.float32, fast_accum=fast)
        assert digest(got[:ROWS, :ROWS].cpu()) == digest(summed(case, fast))


@pytest.mark.nightly(40)
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_another_implementation_has_the_same_bits(pair):
    mmaemu = pytest.importorskip("mmaemu", reason="pip install mmaemu")
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor(0.3), torch.tensor(1.7)

    def any_code(dtype: torch.dtype, rows: int, K: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, K), generator=generator).to(torch.uint8).view(dtype)

    def wide(dtype: torch.dtype, rows: int, K: int) -> torch.Tensor:
        x = torch.randn(rows, K, generator=generator) * torch.randint(-12, 6, (rows, K), generator=generator).float().exp2()
        return x.clamp(-448, 448).to(dtype)

    for K, make in itertools.product((16, 32, 48, 128, 144, 208, 512, 4096), (any_code, wide)):
        a, b = make(pair[0], 16, K), make(pair[1], 32, K)
        for fast, out in itertools.product((True, False), (torch.float32, torch.bfloat16)):
            want = mmaemu.scaled_mm(a, b.t(), *scales, out_dtype=out, use_fast_accum=fast, splitk=1)
            with accumulating("hopper"):
                got = ops.scaled_mm(a, b, *scales, None, out, fast_accum=fast)
            assert digest(got) == digest(want), (K, make.__name__, fast, out)
