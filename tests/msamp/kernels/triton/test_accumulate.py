"""The Triton sums of micro-batches bit for bit against their twins: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.choices import each_once
from helpers.numerics import KINDS, bits, make, measure
from msamp.kernels.reference import accumulate as twins
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.tensor import ScalingTensor

KEY = -0x123456789ABCDEF
FORMATS, ROUNDINGS = (E4M3, E5M2, FP16), (False, True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (3, 5), (17, 129), (5, 8193))
rounding = pytest.mark.parametrize("stochastic", ROUNDINGS, ids=["nearest", "stochastic"])
INF, NAN = float("inf"), float("nan")


def kernels():
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.accumulate")


def sums(functions, gradients, fmt, stochastic: bool, draw: int = 0) -> list[torch.Tensor]:
    """What three tensors hold after the gradients were added up in order: payload, scale_inv; the last sum, and the payload alone; draw."""
    *gradients, last = gradients
    device = last.device
    payload = torch.full(last.shape, 3.0, device=device).to(fmt.dtype)
    scale_inv = torch.full((), 5.0, device=device)
    number = torch.full((), draw, dtype=torch.int64, device=device) if stochastic else None
    for i, g in enumerate(gradients):
        functions.accumulate(g, payload, scale_inv, number, KEY, i == 0)
    end, replaced = last.clone(), torch.full_like(last, NAN)
    functions.add_payload_(end, payload, scale_inv)
    functions.add_payload_(replaced, payload, scale_inv, replace=True)
    return [payload, scale_inv, end, replaced] + ([] if number is None else [number])


def assert_same(gradients, fmt, stochastic: bool, draw: int = 0) -> list[torch.Tensor]:
    before = [g.clone() for g in gradients]
    got, want = (sums(functions, gradients, fmt, stochastic, draw) for functions in (kernels(), twins))
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = a.float(), b.float()
        assert a.isnan().equal(b.isnan())
        assert bits(a.nan_to_num(7.0)).equal(bits(b.nan_to_num(7.0)))  # the sign of a NaN is the hardware's
    assert all(bits(g).equal(bits(old)) for g, old in zip(gradients, before, strict=True)), "gradients are only read"
    return got


@each_once(0.3, fmt=FORMATS, dtype=DTYPES, stochastic=ROUNDINGS, shape=SHAPES)
def test_ragged_shapes(fmt, dtype, stochastic, shape, triton_device):
    assert_same([make("log-normal", shape, seed=i, device=triton_device).to(dtype) for i in range(4)], fmt, stochastic)


@each_once(0.5, fmt=FORMATS, stochastic=ROUNDINGS, kind=KINDS, large=[0, 2**30])
def test_several_programs(fmt, stochastic, kind, large, triton_device, monkeypatch):
    monkeypatch.setattr(kernels(), "LARGE", large)  # programs of several blocks, or of one
    gradients = [make(kind, (100, 700), seed=i, device=triton_device).bfloat16() for i in range(3)]
    assert_same(gradients, fmt, stochastic, draw=2**40 + 5)


@rounding
@pytest.mark.parametrize("size", [0.0, 2.0**-140, 2.0**-30, 2.0**100])
def test_sums_of_all_magnitudes(stochastic, size, triton_device):
    gradients = [make("normal", (40, 50), seed=i, device=triton_device) * size for i in range(3)]
    _, scale_inv, *_ = assert_same(gradients, E4M3, stochastic)
    assert scale_inv.isfinite()


@each_once(0.3, fmt=FORMATS, stochastic=ROUNDINGS, bad=(NAN, INF, -INF), at=(0, 1))
def test_what_is_not_finite_stays_visible(fmt, stochastic, bad, at, triton_device):
    gradients = [make("normal", (33, 70), seed=i, device=triton_device) for i in range(4)]
    gradients[at][20, 30] = bad
    _, scale_inv, last, *_ = assert_same(gradients, fmt, stochastic)
    assert scale_inv.isnan()
    assert last.isnan().all()


@each_once(0.1, fmt=FORMATS, stochastic=ROUNDINGS)
def test_an_empty_gradient(fmt, stochastic, triton_device):
    assert_same([torch.zeros(0, 4, device=triton_device)] * 3, fmt, stochastic)


def test_another_draw_and_another_element_have_other_words(triton_device):
    g = torch.full((64, 64), 1.03, device=triton_device)  # between two codes
    first, second = (assert_same([g, g], E4M3, True, draw)[0].float() for draw in (0, 1))
    for payload in (first, second):
        assert 0.1 < (payload == payload.max()).float().mean() < 0.9
    assert 0.1 < (first != second).float().mean() < 0.9


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_of_a_first_sum_is_that_of_a_cast(fmt, kind, triton_device):
    g = make(kind, (64, 128), device=triton_device)
    payload, scale_inv = torch.empty(g.shape, dtype=fmt.dtype, device=g.device), torch.zeros((), device=g.device)
    kernels().accumulate(g, payload, scale_inv, None, 0, True)
    want = ScalingTensor.quantize(g, fmt)
    assert bits(payload).equal(bits(want.payload))
    assert scale_inv.equal(want.scale_inv)
    values = payload.float() * scale_inv
    assert measure(g, values, payload, fmt) == measure(g, want.dequantize(torch.float32), want.payload, fmt)
