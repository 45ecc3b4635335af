"""Stores of optimizer states against golden vectors of an independent NumPy reference; the two guards; bad input."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.adamw_inputs import adamw_batch
from helpers.choices import every_value
from msamp.kernels.reference.adamw import Batch, Hyper, adamw, hyper_numbers
from msamp.kernels.reference.store import Rounding, fallen, load, rounding_of, store_
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, Format, by_name
from msamp.numerics.quantize import cast
from msamp.numerics.stochastic_rounding import Thresholds, cast_stochastically, round_stochastically
from msamp.numerics.tensor import ScalingTensor

# Computed in NumPy from the formulas alone, by a script that shares nothing with msamp (tests/golden/stochastic_rounding.py, in history).
# `words`: key, offset and step -> UINT32 words of m, v and master; `casts`: values and words -> codes by format, `fp16-master` with
# subnormal values rounded toward zero; `adamw`: 12 steps with m in E4M3, v in FP16 to nearest, master in FP16: codes and scale_inv.
GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "stochastic_rounding.json").read_text(encoding="utf-8"))
BETAS = [(0.9, 0.95), (0.9, 0.999), (0.99, 0.999)]


def array(packed: str, dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(packed), dtype=np.dtype(dtype).newbyteorder("<")).copy())


def codes(x: torch.Tensor) -> torch.Tensor:
    """The payload's bits as integers."""
    return x.view(torch.uint8).int() if x.element_size() == 1 else x.view(torch.int16).int() & 0xFFFF


@pytest.mark.parametrize("case", GOLDEN["words"], ids=lambda case: f"{case['offset']}-{case['step']}")
def test_words_are_the_golden_ones(case):
    at = Thresholds(case["key"], case["offset"], case["step"])
    for state in ("m", "v", "master"):
        assert at.of(state, 0, 32, torch.device("cpu")).equal(array(case[state], np.uint32).view(torch.int32))


@pytest.mark.parametrize("name", ["fp8-e4m3", "fp8-e5m2", "fp16", "fp16-master"])
def test_casts_are_the_golden_ones(name: str):
    x, words = array(GOLDEN["casts"]["x"], np.float32), array(GOLDEN["casts"]["words"], np.uint32).view(torch.int32)
    fmt = by_name(name.removesuffix("-master"))
    got = cast(round_stochastically(x, words, fmt, subnormals=name == fmt.name), fmt)
    assert codes(got).equal(array(GOLDEN["casts"][name], np.uint16).int())


def golden_batch(run) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """The batch at the start, the gradients of each step, and where amaxes as stored are kept."""
    p = array(run["p"], np.float32)
    zeros = torch.zeros(p.shape)

    def scaled(fmt: Format) -> ScalingTensor:
        return ScalingTensor(zeros.to(fmt.dtype), torch.ones(()), torch.float32)

    master = ScalingTensor.quantize(p, FP16, dtype=torch.float32)
    batch = adamw_batch([zeros], [scaled(E4M3)], [scaled(FP16)], [master], keys=[run["key"]], offsets=[run["offset"]])
    return batch, array(run["gradients"], np.float32).view(-1, *p.shape), torch.zeros(3, 1)


def amaxes_of(batch: Batch, kept: torch.Tensor) -> torch.Tensor:
    """Of gradient, m, v and master as stored."""
    kept[2] = batch.masters[0].dequantize(torch.float32).abs().max()
    return torch.cat([batch.grads[0].abs().max().view(1, 1), kept])


def check_golden(update, tables=None) -> None:
    """Assert that an update's states after each step are the golden ones: scales exact, codes but one in 1 %."""
    run = GOLDEN["adamw"]
    batch, gradients, kept = golden_batch(run)
    hyper = torch.tensor(hyper_numbers(Hyper(1e-3, 0.9, 0.95, 1e-8, 0.1)), dtype=torch.float64)
    for g, want in zip(gradients, run["steps"], strict=True):
        batch.grads[0].copy_(g)
        update(
            tables,
            batch,
            hyper,
            amaxes_of(batch, kept),
            kept,
            None,
            torch.tensor(True),
            decoupled=True,
            rounding=Rounding(m=True, masters=True),
        )
        for name, x in (("m", batch.ms[0]), ("v", batch.vs[0]), ("master", batch.masters[0])):
            assert float(x.scale_inv) == want[name]["scale_inv"], name
            theirs = array(want[name]["codes"], np.uint8 if name == "m" else np.uint16).int()
            off = codes(x.payload) - theirs
            assert off.abs().max() <= 1, name
            assert off.ne(0).float().mean() <= 0.011, name


def test_steps_of_adamw_are_the_golden_ones():
    check_golden(adamw)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=str)
def test_a_second_moment_is_never_stored_as_zero_where_its_tensor_has_had_a_gradient(fmt: Format):
    values = torch.tensor([0.0, 1e-44, 1e-20, 1e-9, 1.0])
    for thresholds in (None, [Thresholds(1, 0, 1)]):
        state = (
            ScalingTensor(torch.zeros(5).to(fmt.dtype), torch.ones(()), torch.float32) if fmt.scaled else torch.zeros(5, dtype=fmt.dtype)
        )
        store_([state], [values.clone()], torch.tensor([1.0]), thresholds, "v", positive=True)
        stored = load([state])[0]
        assert stored.gt(0).all()
        assert stored[0] <= 2.0**-39 or fmt.bytes == 1
        assert stored[4] == 1
        store_([state], [torch.zeros(5)], torch.tensor([0.0]), thresholds, "v", positive=True)
        assert load([state])[0].eq(0).all()


@every_value
@pytest.mark.parametrize("beta1", [0.5, 0.9, 0.95, 0.99, 0.999])
@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=str)
def test_every_code_falls_to_zero_without_a_gradient(fmt: Format, beta1: float):
    """To nearest: a code falls at every step, so that the largest takes no more steps than the format has codes."""
    every = torch.arange(2**7 if fmt.bytes == 1 else 2**15, dtype=torch.int32)
    start = every.to(torch.uint8).view(fmt.dtype) if fmt.bytes == 1 else every.to(torch.int16).view(fmt.dtype)
    start = start[start.float().isfinite()]
    before, silent = start.float(), torch.ones(start.shape, dtype=torch.bool)
    after = fallen(cast(before * beta1, fmt), before, silent).float()
    assert (after < before)[1:].all()
    assert after[0] == 0
    loud = fallen(cast(before * beta1, fmt), before, ~silent)
    assert codes(loud).equal(codes(cast(before * beta1, fmt)))


def test_negative_codes_fall_towards_zero():
    start = -torch.arange(8) * E4M3.smallest
    payload = fallen(cast(start * 0.9, E4M3), start.abs(), torch.ones(8, dtype=torch.bool))
    assert payload.float().abs().lt(start.abs())[1:].all()
    assert payload.float().le(0).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
def test_stochastically_codes_below_the_smallest_normal_value_fall_without_a_gradient(fmt: Format):
    codes_below = torch.arange(1, min(2**fmt.mantissa_bits, 64)) * fmt.smallest
    for step in range(1, 30):
        got = cast_stochastically(codes_below * 0.99, fmt, Thresholds(3, 0, step), "m", torch.ones_like(codes_below, dtype=torch.bool))
        assert got.float().equal(codes_below - fmt.smallest)
    normal = torch.linspace(fmt.tiny, 4 * fmt.tiny, 100)
    silent = cast_stochastically(normal, fmt, Thresholds(3, 0, 1), "m", torch.ones(100, dtype=torch.bool))
    assert silent.float().equal(cast_stochastically(normal, fmt, Thresholds(3, 0, 1), "m").float())


def test_nearest_rounding_keeps_v_where_its_stall_is_below_two_percent():
    assert rounding_of("stochastic", "nearest", FP16, 0.95) == Rounding(m=True)
    assert rounding_of("stochastic", "stochastic", FP16, 0.999) == Rounding(True, True, True)
    assert rounding_of("stochastic", "nearest", BF16, 0.95) == Rounding(m=True, v=True)
    assert rounding_of("nearest", "stochastic", E4M3, 0.999) == Rounding(masters=True)
    assert rounding_of("stochastic", "nearest", FP16, 1.0) == Rounding(m=True, v=True)


def test_large_states_are_rounded_in_parts_by_the_same_thresholds(monkeypatch):
    x, at = torch.randn(1000), Thresholds(5, 7, 3)
    whole = cast_stochastically(x, FP16, at, "master")
    monkeypatch.setattr("msamp.numerics.stochastic_rounding._PART", 64)
    assert cast_stochastically(x, FP16, at, "master").equal(whole)
