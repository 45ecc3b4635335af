"""Casts against the package ml_dtypes, which rounds alike and does not saturate, and against the golden vectors."""

import ml_dtypes
import numpy as np
import pytest
import torch

from helpers.choices import each_value
from helpers.numerics import KINDS, LARGE, SMALL, check, codes, floats, golden, make, measure, random_floats
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32
from msamp.numerics.quantize import cast, dequantize, quantize
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


@each_value(shape=[SMALL, LARGE], kind=KINDS, fmt=[E4M3, E5M2, FP16])
def test_loss_of_a_cast_three_ways(fmt, kind, shape, device):
    x = make(kind, shape, device=device)
    scale = scale_from_amax(x.abs().amax(), fmt.max)
    payload = quantize(x, scale, fmt)
    check("cast", fmt.name, kind, shape, measure(x, dequantize(payload, inverse(scale)), payload, fmt))
