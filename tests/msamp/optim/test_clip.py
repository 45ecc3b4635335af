"""Norm and clipping over plain and FP8 gradients together."""

import math

import pytest
import torch
from numerics import codes, make
from torch import nn

from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.clip import clip_coefficient, clip_grad_norm_, grad_norm, tensor_norm


def gradients(device="cpu") -> list[torch.Tensor]:
    plain = [make("normal", (40, 8), device=device), make("normal", (8,), seed=1, device=device).bfloat16()]
    low = [ScalingTensor.quantize(make("log-normal", (16, 8), seed=2 + i, device=device), f) for i, f in enumerate((E4M3, E5M2, FP16))]
    return [*plain, *low]


def values(g: torch.Tensor) -> torch.Tensor:
    return g.dequantize(torch.float64) if isinstance(g, ScalingTensor) else g.double()


def parameters(grads: list[torch.Tensor]) -> list[nn.Parameter]:
    ps = [nn.Parameter(torch.zeros(g.shape, dtype=g.dtype, device=g.device)) for g in grads]
    for p, g in zip(ps, grads, strict=True):
        p.grad = g
    return [*ps, nn.Parameter(torch.zeros(3))]


def test_the_norm_of_each_gradient_and_of_all(device):
    grads = gradients(device)
    for g in grads:
        assert tensor_norm(g).dtype == torch.float64
        assert tensor_norm(g).item() == pytest.approx(values(g).norm().item(), rel=1e-12)
    want = math.sqrt(sum(values(g).square().sum().item() for g in grads))
    assert grad_norm(grads).item() == pytest.approx(want, rel=1e-12)


def test_no_gradients_have_norm_zero():
    norm = grad_norm([])
    assert (norm.item(), norm.dtype) == (0.0, torch.float64)
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0


def test_a_norm_beyond_fp32_is_finite():
    assert grad_norm([torch.full((4,), 3e38), torch.full((4,), 3e38)]).item() == pytest.approx(math.sqrt(8) * 3e38, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_norm(bad):
    x = make("normal", (8, 8))
    x[1, 1] = bad
    for g in (x, ScalingTensor.quantize(x, E4M3)):
        assert not grad_norm([torch.ones(3), g]).isfinite()


@pytest.mark.parametrize(("norm", "want"), [(0.5, 1.0), (2.0, 1.0 / (2.0 + 1e-6)), (0.0, 1.0)])
def test_the_coefficient(norm, want):
    got = clip_coefficient(torch.tensor(norm, dtype=torch.float64), 1.0)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(want, rel=1e-7)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_clipping_norm_that_is_not_positive_is_refused(bad):
    with pytest.raises(ValueError, match=rf"clipping norm is {bad}; it must be greater than 0"):
        clip_coefficient(torch.ones(()), bad)


def test_clipping_fp8_gradients_is_clipping_what_they_stand_for(device):
    low, plain = gradients(device), [values(g).float() for g in gradients(device)]
    before = [codes(g.payload) for g in low[2:]]
    norm = clip_grad_norm_(parameters(low), 0.7)
    want = torch.nn.utils.clip_grad_norm_(parameters(plain), 0.7)
    assert norm.item() == pytest.approx(want.item(), rel=1e-5)
    assert [codes(g.payload).equal(b) for g, b in zip(low[2:], before, strict=True)] == [True] * 3
    for g, w in zip(low, plain, strict=True):
        assert torch.allclose(values(g).float(), w, rtol=1e-2 if g.dtype == torch.bfloat16 else 2e-6)
    assert grad_norm(low).item() == pytest.approx(0.7, rel=1e-3)


def test_small_gradients_are_left_as_they_are():
    low = gradients()
    want = [values(g) for g in low]
    clip_grad_norm_(parameters(low), 1e9)
    assert all(values(g).equal(w) for g, w in zip(low, want, strict=True))


def test_the_norm_does_not_depend_on_the_grouping_into_calls():
    grads = gradients()
    assert grad_norm(iter(grads)) == grad_norm(grads)
