"""GELU, SwiGLU and squared ReLU against torch in FP64, their gradients against autograd, and what the quantised results lose."""

import pytest
import torch
from torch.nn import functional

from helpers.agreement import assert_no_worse
from helpers.numerics import KINDS, bits, codes, make
from msamp.kernels.reference.activate import activate, activate_backward
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse

every_activation = pytest.mark.parametrize("kind", ["gelu", "swiglu", "squared-relu"])
ONE = torch.ones(())


def exact(y: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "gelu":
        return functional.gelu(y, approximate="tanh")
    if kind == "squared-relu":
        return functional.relu(y).square()
    gate, up = y.chunk(2, dim=1)
    return functional.silu(gate) * up


def exact_gradient(grad_a: torch.Tensor, y: torch.Tensor, kind: str) -> torch.Tensor:
    y = y.double().requires_grad_()
    return torch.autograd.grad(exact(y, kind), y, grad_a.double())[0]


@every_activation
@pytest.mark.parametrize("values", KINDS)
def test_forward_and_gradient_are_those_of_torch_in_fp64(kind, values):
    y = make(values, (48, 64)).clamp(-1e4, 1e4)
    want = exact(y.double(), kind)
    got, empty = activate(y, kind, None, None, torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-6)
    assert empty.numel() == 0
    grad_a = make(values, tuple(want.shape), seed=1)
    g, g_t, scale_inv, a_t, sums = activate_backward(grad_a, y, kind, ONE, E4M3.dtype, None, None, torch.float32, colsum=True)
    reference = exact_gradient(grad_a, y, kind)
    torch.testing.assert_close(g.double(), reference, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums.double().sum(0), reference.sum(0), rtol=1e-4, atol=1e-5 * float(reference.abs().sum(0).max()))
    assert [t.numel() for t in (g_t, scale_inv, a_t)] == [0, 0, 0]


@every_activation
@pytest.mark.parametrize("values", KINDS)
def test_quantised_results_lose_what_one_rounding_loses(kind, values):
    y = make(values, (64, 128)).clamp(-1e4, 1e4).bfloat16()
    slot = torch.zeros(())
    a, a_scale_inv = activate(y, kind, None, slot, E4M3.dtype)
    want = exact(y.double(), kind).float()
    assert_no_worse(want, a, a_scale_inv, E4M3, quantize(want, inverse(a_scale_inv), E4M3))
    torch.testing.assert_close(slot, want.abs().max(), rtol=1e-5, atol=0)
    grad_a = make("normal", tuple(want.shape), seed=1).bfloat16()
    g, g_t, scale_inv, a_t, _ = activate_backward(grad_a, y, kind, a_scale_inv, E4M3.dtype, None, None, E5M2.dtype)
    want = exact_gradient(grad_a, y, kind).float()
    assert_no_worse(want, g, scale_inv, E5M2, quantize(want, inverse(scale_inv), E5M2))
    assert codes(g_t).equal(codes(g).t())
    assert codes(a_t).equal(codes(a).t())
    assert all(t.is_contiguous() for t in (g, g_t, a_t))


@every_activation
def test_large_inputs_saturate_and_do_not_become_nan(kind):
    big = torch.tensor([-3e38, -1e30, -1e5, -300.0, -30.0, 0.0, 30.0, 300.0, 1e5, 1e18])
    y = torch.stack([big, torch.ones(10)], dim=1) if kind == "swiglu" else big[:, None]
    a = activate(y, kind, None, None, torch.float32)[0]
    g = activate_backward(torch.ones(10, 1), y, kind, ONE, E4M3.dtype, None, None, torch.float32)[0]
    if kind == "squared-relu":
        assert torch.equal(a, y.clamp(min=0).square())
        assert torch.equal(g, 2 * y.clamp(min=0))
        return
    torch.testing.assert_close(a[:, 0], big.clamp(min=0.0), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(g[:, 0], torch.tensor([0.0] * 5 + [0.5] + [1.0] * 4), rtol=1e-6, atol=1e-9)


@every_activation
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(kind, bad):
    y, slot = make("normal", (8, 16)), torch.zeros(())
    y[2, 3] = bad
    assert activate(y, kind, ONE, slot, E4M3.dtype)[1].isnan()
    assert slot.isinf()
    good, grad_a = make("normal", (8, 16)), make("normal", (8, 8 if kind == "swiglu" else 16), seed=1)
    grad_a[5, 1] = bad
    assert activate_backward(grad_a, good, kind, ONE, E4M3.dtype, ONE, slot.zero_(), E5M2.dtype)[2].isnan()
    assert slot.isinf()


def test_a_given_scale_is_used_and_a_wide_dtype_takes_neither_scale_nor_amax():
    y, slot = make("normal", (8, 16)), torch.zeros(())
    a, scale_inv = activate(y, "gelu", torch.tensor(8.0), slot, E4M3.dtype)
    assert scale_inv == 0.125
    assert slot > 0
    assert codes(a).equal(codes(quantize(activate(y, "gelu", None, None, torch.float32)[0], 8.0, E4M3)))
    plain = activate(y, "gelu", torch.tensor(8.0), slot.zero_(), torch.bfloat16)[0]
    assert bits(plain).equal(bits(activate(y, "gelu", None, None, torch.float32)[0].bfloat16()))
    assert slot == 0


def test_what_does_not_fit_is_refused():
    y = make("normal", (4, 6))
    with pytest.raises(ValueError, match="activation is 'relu'; choose one of gelu, swiglu, squared-relu"):
        activate(y, "relu", None, None, E4M3.dtype)
    with pytest.raises(ValueError, match=r"input of swiglu is \(4, 5\); it must be"):
        activate(y[:, :5], "swiglu", None, None, E4M3.dtype)


def test_channel_scales_multiply_what_is_stored_and_not_the_amaxes():
    y, by = make("log-normal", (64, 16)).clamp(-1e3, 1e3), torch.tensor([1.0, 2.0, 4.0, 256.0] * 2)
    scale, slot, maxima = torch.tensor(0.25), torch.zeros(()), torch.zeros(8)
    a, scale_inv = activate(y, "swiglu", scale, slot, E4M3.dtype, channel_scale=by, channel_amax_slot=maxima)
    wide = activate(y, "swiglu", None, None, torch.float32)[0]
    assert codes(a).equal(codes(quantize(wide * by, scale, E4M3)))
    assert maxima.equal(wide.abs().amax(0))
    assert slot == maxima.max()
    a_t = activate_backward(make("normal", (64, 8)), y, "swiglu", scale_inv, E4M3.dtype, None, None, E5M2.dtype, channel_scale=by)[3]
    assert codes(a_t).equal(codes(a).t())
