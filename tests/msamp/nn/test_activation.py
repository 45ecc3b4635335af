"""Activations that keep their input in FP8: torch's own in value, near them in gradient, and smaller."""

import pytest
import torch
from torch.nn import functional

from helpers.numerics import make
from msamp.nn.activation import Activation
from msamp.nn.saved_activations import AsItIs, GroupedFP8
from msamp.numerics.metrics import sqnr_db


def plain(y: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "gelu":
        return functional.gelu(y, approximate="tanh")
    if kind == "squared-relu":
        return functional.relu(y).square()
    gate, up = y.chunk(2, -1)
    return functional.silu(gate) * up


@pytest.mark.parametrize(("saved", "least"), [(AsItIs(), 100.0), (GroupedFP8(), 30.0)], ids=["as it is", "coat"])
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
def test_its_output_may_be_changed_in_place(shape):
    x = torch.randn(shape, requires_grad=True)
    Activation("gelu")(x).add_(1.0).sum().backward()
    assert x.grad.isfinite().all()
