"""Stochastic rounding: thresholds from a counter, evenly spread over elements and steps; casts whose mean is the value."""

import pytest
import torch

from helpers.numerics import make
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, Format
from msamp.numerics.quantize import cast
from msamp.numerics.stochastic_rounding import Thresholds, cast_stochastically, round_stochastically, tensor_key

CPU = torch.device("cpu")
FORMATS = [E4M3, E5M2, FP16, BF16]
KEY = tensor_key(1234, "decoder.layers.0.mlp.linear_fc1.weight")


def drawn(state: str = "m", key: int = KEY, offset: int = 0, step: int = 1, count: int = 2**16) -> torch.Tensor:
    return Thresholds(key, offset, step).of(state, 0, count, CPU)


def test_a_key_follows_from_seed_name_and_coordinates():
    keys = {tensor_key(seed, name, *at) for seed in (0, 1) for name in ("a", "b") for at in ((), (0,), (1,), (1, 0))}
    assert len(keys) == 16
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert tensor_key(0, "a", 1) == tensor_key(0, "a", 1) == -266278209153689261  # a checkpoint's keys outlive the process


def test_an_element_has_its_threshold_however_the_tensor_is_cut():
    whole = drawn(count=1000)
    for start, end in ((0, 1), (17, 400), (400, 1000)):
        assert drawn(offset=start, count=end - start).equal(whole[start:end])
    assert Thresholds(KEY, 3, 1).of("m", 4, 10, CPU).equal(whole[7:17])


def test_the_thresholds_of_an_element_fill_the_interval_evenly_over_the_steps():
    """The discrepancy of a Kronecker sequence of the golden ratio is below 2 / n ln n; independent draws would have 1 / sqrt(n)."""
    steps = torch.stack([drawn(step=step, count=64) for step in range(1, 257)]).sort(0).values.double() / 2**32 + 0.5
    assert (steps - torch.arange(256).double().unsqueeze(1) / 256).abs().max() < 0.02


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_what_the_format_holds_stays_and_everything_else_goes_to_a_neighbour(fmt: Format):
    x = torch.cat([make(kind, (2**12,)) * 2.0 ** (i - 6) for i, kind in enumerate(("normal", "channel-outlier", "log-normal"))])
    at = Thresholds(KEY, 0, 5)
    held = cast(x, fmt).float()
    assert cast_stochastically(held, fmt, at, "m").float().equal(held)
    down, up = (round_stochastically(x, torch.full(x.shape, r, dtype=torch.int32), fmt) for r in (0, -1))
    got = cast_stochastically(x, fmt, at, "m").float()
    inside = x.abs() <= fmt.max
    assert got[inside].clamp(torch.minimum(down, up)[inside], torch.maximum(down, up)[inside]).equal(got[inside])
    ends = torch.stack([down, up])[:, inside]
    assert cast(ends, fmt).float().equal(ends)  # both are values of the format
    nan = torch.tensor([2**31 - 1, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)  # the first two carry over into the sign
    assert cast_stochastically(nan, fmt, at, "m").float().isnan().all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("size", [1.0, "subnormal"], ids=str)
def test_the_mean_over_all_thresholds_is_the_value(fmt: Format, size):
    """Up to the rounding of x + tiny below `tiny`: 2^-24 of it."""
    base = 1.0 if size == 1.0 else fmt.tiny / 8
    code = base * 2.0**-fmt.mantissa_bits if size == 1.0 else fmt.smallest
    for share in (0.0, 2.0**-13, 0.1, 0.37, 0.5, 0.8125, 1 - 2.0**-12):
        x = torch.tensor(base + share * code)
        shift = 23 - fmt.mantissa_bits
        words = (torch.arange(2**shift) * 2 ** (32 - shift)).to(torch.int32)
        every = round_stochastically(x.expand(2**shift), words, fmt)
        bias = abs(float(every.double().mean() - x.double())) / code
        assert bias <= (0 if size == 1.0 else 2.0 ** (fmt.mantissa_bits - 24)), (share, bias)


def test_masters_in_fp16_lose_less_than_a_code_below_the_smallest_normal_value():
    x = torch.tensor([0.3, 0.9, 1.0, 7.6, 500.5, 1023.4, 1024.0, 1500.25]) * FP16.smallest
    words = (torch.arange(2**13) * 2**19).to(torch.int32).unsqueeze(1).expand(-1, x.numel())
    every = cast(round_stochastically(x.expand(2**13, -1), words, FP16, subnormals=False), FP16).float()
    bias = (every.double().mean(0) - x.double()) / FP16.smallest
    assert ((bias[:6] > -1) & (bias[:6] <= 0)).all()
    assert bias[6:].eq(0).all()
    assert every[:, 2].eq(x[2]).all()  # what the format holds stays
