"""Norms that keep their input in FP8: torch's own in value, near them in gradient, and smaller."""

import pytest
import torch
from torch.nn import functional

from helpers.numerics import make
from msamp.nn.saved_activations import GroupedFP8, Saved
from msamp.nn.unfused import Activation, LayerNorm, RMSNorm
from msamp.numerics.metrics import sqnr_db

N = 64
EPS = 1e-5


def pair(rms: bool, saved, device) -> tuple[torch.nn.Module, torch.nn.Module]:
    mine = RMSNorm(N, EPS, saved, device=device) if rms else LayerNorm(N, saved, eps=EPS, device=device)
    theirs = torch.nn.RMSNorm(N, EPS, device=device) if rms else torch.nn.LayerNorm(N, EPS, device=device)
    for seed, parameter in enumerate(mine.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator(device).manual_seed(seed))
    theirs.load_state_dict(mine.state_dict())
    return mine, theirs


def gradients(norm: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = x.clone().requires_grad_()
    y = norm(x)
    return y.detach(), list(torch.autograd.grad(y, [x, *norm.parameters()], grad))


# Of groups of 16 in E4M3 the noise of one rounding, 31.5 dB, reaches the gradients of input and weight; the bias sees no input.
@pytest.mark.parametrize(("saved", "least"), [(Saved(), 100.0), (GroupedFP8(), 28.0)], ids=["as it is", "coat"])
@pytest.mark.parametrize("rms", [False, True])
def test_value_and_gradients(rms, saved, least, device):
    mine, theirs = pair(rms, saved, device)
    x, grad = make("normal", (6, 40, N), device=device) + 0.5, make("normal", (6, 40, N), seed=1, device=device)
    y, found = gradients(mine, x, grad)
    want, wanted = gradients(theirs, x, grad)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    for got, right in zip(found[:2], wanted[:2], strict=True):
        assert sqnr_db(right, got) > least
    if not rms:
        torch.testing.assert_close(found[2], wanted[2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rms", [False, True])
def test_keeps_17_16_bytes_an_element_and_the_statistics(rms, device):
    x = make("normal", (128, N), device=device).bfloat16().requires_grad_()
    y = pair(rms, GroupedFP8(), device)[0](x)
    kept = sum(t.nbytes for t in y.grad_fn.saved_tensors if t is not None and t.shape[:1] == x.shape[:1])
    assert kept == x.numel() * 17 // 16 + 128 * 4 * (1 if rms else 2)
    assert y.dtype == torch.bfloat16


def test_what_is_not_finite_reaches_the_gradients(device):
    mine, _ = pair(False, GroupedFP8(), device)
    x = make("normal", (8, N), device=device)
    x[2, 3] = float("inf")
    _, (grad_x, grad_weight, _) = gradients(mine, x, torch.ones_like(x))
    assert not grad_x[2].isfinite().any()
    assert grad_x[3].isfinite().all()
    assert not grad_weight.isfinite().all()


@pytest.mark.parametrize("shape", [(4, 32), (2, 4, 32)])
def test_its_output_may_be_changed_in_place(shape):
    x = torch.randn(shape, requires_grad=True)
    LayerNorm(32)(x).add_(1.0).sum().backward()
    assert x.grad.isfinite().all()


def plain(y: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "gelu":
        return functional.gelu(y, approximate="tanh")
    if kind == "squared-relu":
        return functional.relu(y).square()
    gate, up = y.chunk(2, -1)
    return functional.silu(gate) * up


@pytest.mark.parametrize(("saved", "least"), [(Saved(), 100.0), (GroupedFP8(), 30.0)], ids=["as it is", "coat"])
@pytest.mark.parametrize("kind", ["gelu", "swiglu", "squared-relu"])
def test_value_and_gradient(kind, saved, least, device):
    y = make("normal", (6, 40, 64), device=device).requires_grad_()
    a, want = Activation(kind, saved)(y), plain(y, kind)
    grad = make("normal", tuple(want.shape), seed=1, device=device)
    torch.testing.assert_close(a, want, rtol=1e-5, atol=1e-5)
    assert sqnr_db(torch.autograd.grad(want, y, grad)[0], torch.autograd.grad(a, y, grad)[0]) > least


@pytest.mark.parametrize("kind", ["gelu", "swiglu", "squared-relu"])
def test_keeps_17_16_bytes_an_element(kind, device):
    y = make("normal", (128, 64), device=device).bfloat16().requires_grad_()
    a = Activation(kind)(y)
    assert sum(t.nbytes for t in a.grad_fn.saved_tensors) == y.numel() * 17 // 16
    assert a.dtype == torch.bfloat16


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="activation is 'relu'"):
        Activation("relu")(torch.zeros(4, 4))


@pytest.mark.parametrize("shape", [(4, 32), (2, 4, 32)])
def test_its_output_may_be_changed_in_place_activation(shape):
    x = torch.randn(shape, requires_grad=True)
    Activation("gelu")(x).add_(1.0).sum().backward()
    assert x.grad.isfinite().all()
