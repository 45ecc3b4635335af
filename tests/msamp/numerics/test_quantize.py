"""Casts against the package ml_dtypes, which rounds alike and does not saturate, and against the golden vectors."""

import ml_dtypes
import numpy as np
import pytest
import torch

from helpers.numerics import KINDS, LARGE, SMALL, check, codes, every_bf16, floats, golden, make, measure, random_floats
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32
from msamp.numerics.quantize import cast, dequantize, quantize, quantize_stochastic
from msamp.numerics.scaling import inverse, scale_from_amax

FP8 = {"e4m3": (E4M3, ml_dtypes.float8_e4m3fn), "e5m2": (E5M2, ml_dtypes.float8_e5m2)}
fp8 = pytest.mark.parametrize("name", FP8)
scaled = pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)


def expected_codes(x: np.ndarray, fmt, other) -> np.ndarray:
    """ml_dtypes' codes of FP32 `x` with saturation put on top."""
    with np.errstate(all="ignore"):
        rounded = x.astype(other)
    wide = rounded.astype(np.float32)
    overflowed = ~np.isfinite(wide) & ~np.isnan(x)
    largest = np.array([fmt.max, -fmt.max], dtype=np.float32).astype(other).view(np.uint8)
    return np.where(overflowed, largest[np.signbit(x).astype(int)], rounded.view(np.uint8))


def assert_same_codes(payload: torch.Tensor, x: np.ndarray, fmt, other) -> None:
    nan = np.isnan(x)
    got = codes(payload).numpy()
    assert np.array_equal(payload.float().isnan().cpu().numpy(), nan)
    assert np.array_equal(got[~nan], expected_codes(x, fmt, other)[~nan])


@fp8
def test_all_256_codes_decode(name):
    fmt, other = FP8[name]
    raw = torch.arange(256, dtype=torch.uint8)
    want = torch.from_numpy(raw.numpy().view(other).astype(np.float32))
    got = dequantize(raw.view(fmt.dtype), 1.0)
    assert got.isnan().equal(want.isnan())
    assert got[~want.isnan()].equal(want[~want.isnan()])


@fp8
def test_all_256_codes_encode_again_to_themselves(name):
    fmt, _ = FP8[name]
    raw = torch.arange(256, dtype=torch.uint8)
    values = dequantize(raw.view(fmt.dtype), 1.0)
    again = codes(cast(values, fmt))
    finite = values.isfinite()
    assert again[finite].equal(raw[finite].int())
    assert cast(values, fmt).float()[values.isinf()].abs().eq(fmt.max).all()


@fp8
def test_every_bf16_value(name, device):
    fmt, other = FP8[name]
    x = every_bf16()
    assert_same_codes(quantize(x.to(device), 1.0, fmt), x.float().numpy(), fmt, other)


@fp8
def test_a_million_floats_of_all_magnitudes(name, device):
    fmt, other = FP8[name]
    x = random_floats(10**6)
    assert_same_codes(cast(x.to(device), fmt), x.numpy(), fmt, other)


@fp8
def test_ties_and_neighbours_of_every_code(name):
    fmt, other = FP8[name]
    grid = dequantize(torch.arange(256, dtype=torch.uint8).view(fmt.dtype), 1.0)
    grid = grid[grid.isfinite()].unique().numpy()
    ties = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)
    x = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf)), -grid * 0])
    assert_same_codes(cast(torch.from_numpy(x), fmt), x, fmt, other)


@fp8
def test_golden_casts(name):
    vectors = golden("cast")
    assert codes(cast(floats(vectors["x"]), FP8[name][0])).tolist() == vectors[name]


def test_fp16_saturates_and_rounds_as_numpy_does():
    x = random_floats(10**5, seed=1)
    got = cast(x, FP16)
    with np.errstate(over="ignore"):
        want = np.clip(x.numpy(), -FP16.max, FP16.max).astype(np.float16)
    assert got.isnan().equal(x.isnan())
    assert codes(got)[~x.isnan()].equal(torch.from_numpy(want.view(np.int16).astype(np.int32) & 0xFFFF)[~x.isnan()])


def test_plain_formats_round_and_keep_infinities():
    x = torch.tensor([1.0, float("inf"), -float("inf"), 1 + 2.0**-9])
    assert cast(x, FP32).equal(x)
    assert cast(x, BF16).equal(x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_with_the_scale_is_taken_in_fp32(dtype):
    x = torch.tensor([300.0, 1e-5, -7.0]).to(dtype)
    got = quantize(x, torch.tensor(2.0**14), E5M2)
    assert codes(got).equal(codes(cast(x.float() * 2.0**14, E5M2)))
    above_a_tie = quantize(torch.ones(3, dtype=dtype), torch.tensor(1.06251), E4M3)  # in fewer digits 1.0625, which rounds down to 1
    assert above_a_tie.float().tolist() == [1.125] * 3


def test_dequantize_rounds_once_to_the_asked_dtype():
    payload = cast(torch.tensor([1.5, -448.0]), E4M3)
    back = dequantize(payload, torch.tensor(2.0**-3), torch.bfloat16)
    assert back.dtype == torch.bfloat16
    assert back.tolist() == [0.1875, -56.0]


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@scaled
def test_loss_of_a_cast_three_ways(fmt, kind, shape, device):
    x = make(kind, shape, device=device)
    scale = scale_from_amax(x.abs().amax(), fmt.max)
    payload = quantize(x, scale, fmt)
    check("cast", fmt.name, kind, shape, measure(x, dequantize(payload, inverse(scale)), payload, fmt))


# ------------------------------------------------------------------------------------------------------- stochastic rounding


def seeded(device, seed: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def every_value(fmt) -> torch.Tensor:
    """FP32: every finite value of a format, both zeros among them."""
    raw = torch.arange(256, dtype=torch.uint8) if fmt.bytes == 1 else torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = raw.view(fmt.dtype).float()
    return values[values.isfinite()]


def neighbours(y: torch.Tensor, fmt) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of a format next below and above `y`, which is none of them, read off the list of all."""
    grid = every_value(fmt).unique()
    above = torch.searchsorted(grid, y)
    return grid[above - 1], grid[above]


def between_codes(fmt, count: int) -> torch.Tensor:
    """FP32 [count] of both signs, over the whole range of a format, a quarter of them subnormal."""
    generator = seeded("cpu")
    grid = every_value(fmt).abs().unique()
    subnormals = int((grid < fmt.tiny).sum())
    index = torch.randint(0, len(grid) - 1, (count,), generator=generator)
    index[::4] %= subnormals
    share = 0.05 + 0.9 * torch.rand(count, generator=generator)
    sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return sign * (grid[index] + share * (grid[index + 1] - grid[index]))


@scaled
def test_stochastic_rounding_is_unbiased_between_the_two_neighbours(fmt, device):
    draws = 4096
    y = between_codes(fmt, 400)
    low, high = neighbours(y, fmt)
    wide = y.to(device).expand(draws, -1)
    got = quantize_stochastic(wide, 1.0, fmt, seeded(device)).float().cpu()
    assert ((got == low) | (got == high)).all()
    assert got.amin(0).equal(low)
    assert got.amax(0).equal(high)
    chance = (y - low) / (high - low)
    sigma = (high - low) * (chance * (1 - chance) / draws).sqrt()
    z = (got.double().mean(0) - y) / sigma
    assert z.abs().max() <= 4
    assert abs(float(z.mean())) * len(z) ** 0.5 <= 4


@scaled
def test_stochastic_rounding_keeps_what_is_representable(fmt, device):
    values = every_value(fmt)
    for seed in range(8):
        assert codes(quantize_stochastic(values.to(device), 1.0, fmt, seeded(device, seed))).equal(codes(values.to(fmt.dtype)))


@scaled
def test_stochastic_rounding_saturates_and_keeps_nan(fmt, device):
    inf = float("inf")
    x = torch.tensor([inf, -inf, fmt.max * 1.01, -fmt.max * 1.01, 3e38, float("nan")], device=device)
    got = quantize_stochastic(x, 1.0, fmt, seeded(device)).float().cpu()
    assert got[:5].tolist() == [fmt.max, -fmt.max, fmt.max, -fmt.max, fmt.max]
    assert got[5].isnan()


@scaled
def test_values_far_below_the_format_vanish_and_keep_their_sign(fmt, device):
    x = torch.tensor([-(2.0**-60), 2.0**-60, -0.0, 0.0], device=device)
    got = quantize_stochastic(x, 1.0, fmt, seeded(device)).cpu()
    assert codes(got).equal(codes(torch.tensor([-0.0, 0.0, -0.0, 0.0]).to(fmt.dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seed_repeats_stochastic_rounding(dtype, device):
    x = make("normal", SMALL, device=device).to(dtype)
    scale = torch.tensor(32.0, device=device)
    first, again, other = (codes(quantize_stochastic(x, scale, E4M3, seeded(device, seed))) for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)
    assert first.equal(codes(quantize_stochastic(x.float() * scale, 1.0, E4M3, seeded(device, 1))))


@pytest.mark.parametrize("fmt", [BF16, FP32], ids=str)
def test_stochastic_rounding_refuses_plain_formats(fmt):
    with pytest.raises(ValueError, match=f"{fmt}.*choose fp8-e4m3, fp8-e5m2 or fp16"):
        quantize_stochastic(torch.ones(2), 1.0, fmt)
