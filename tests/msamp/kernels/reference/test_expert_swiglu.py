"""SwiGLU with the router's probability, against autograd in FP64."""

import pytest
import torch
import torch.nn.functional as F

from helpers.numerics import KINDS, codes, make, measure
from msamp.kernels.reference.expert_swiglu import expert_swiglu, expert_swiglu_backward
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.quantize import dequantize

ROWS, WIDTH = 40, 48


def inputs(kind: str = "normal") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_a [ROWS, WIDTH], y [ROWS, 2 WIDTH], probs [ROWS], one of them 0."""
    probs = torch.rand(ROWS, generator=torch.Generator().manual_seed(3))
    probs[5] = 0.0
    return make(kind, (ROWS, WIDTH), seed=1), make(kind, (ROWS, 2 * WIDTH)).clamp(-1e3, 1e3), probs


def exact(grad_a: torch.Tensor, y: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Result and gradients of y and probs, FP64."""
    y, probs = y.double().requires_grad_(), probs.double().requires_grad_()
    gate, up = y.chunk(2, 1)
    a = F.silu(gate) * up * probs.unsqueeze(1)
    return a.detach(), *torch.autograd.grad(a, (y, probs), grad_a.double())


# Least SQNR in dB and largest share that became zero, of the result and of the gradient: products of two inputs span more than the formats.
LIMITS = {
    "normal": ((29.8, 0.005), (24.4, 0.001)),
    "channel-outlier": ((35.7, 0.08), (24.4, 0.02)),
    "log-normal": ((30.0, 0.4), (22.6, 0.04)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_result_and_gradients(kind):
    grad_a, y, probs = inputs(kind)
    a, grad_y, grad_probs = exact(grad_a, y, probs)
    a8, a_scale_inv = expert_swiglu(y, probs, None, None, E4M3.dtype)
    g, g_t, scale_inv, a_t, parts = expert_swiglu_backward(grad_a, y, probs, a_scale_inv, E4M3.dtype, None, None, E5M2.dtype)
    results = ((a, a8, a_scale_inv, E4M3), (grad_y, g, scale_inv, E5M2))
    for (x, payload, inverse, fmt), (sqnr, underflow) in zip(results, LIMITS[kind], strict=True):
        got = measure(x.float(), dequantize(payload, inverse), payload, fmt)
        assert got.sqnr_db >= sqnr, (kind, got)
        assert got.underflow <= underflow, (kind, got)
        assert got.saturation <= 1e-3, (kind, got)
    assert codes(g_t).equal(codes(g).t())
    assert codes(a_t).equal(codes(a8).t())
    torch.testing.assert_close(parts.sum(0).double(), grad_probs, rtol=1e-4, atol=1e-4)


def test_a_wide_result_is_not_cast():
    grad_a, y, probs = inputs()
    a, scale_inv = expert_swiglu(y, probs, None, None, torch.float32)
    assert scale_inv.numel() == 0
    torch.testing.assert_close(a.double(), exact(grad_a, y, probs)[0], rtol=1e-5, atol=1e-6)


def test_the_amax_is_that_of_the_weighted_result():
    _, y, probs = inputs()
    slots = torch.zeros(2)
    for slot, weight in zip(slots.unbind(), (1.0, 0.25), strict=True):
        expert_swiglu(y, probs * weight, torch.ones(()), slot, E4M3.dtype)
    assert slots[1] == slots[0] / 4


def test_rows_that_cannot_be_packed_are_refused():
    grad_a, y, probs = inputs()
    with pytest.raises(ValueError, match="there are 39 rows; their transpose needs a multiple of 4: pad groups"):
        expert_swiglu_backward(grad_a[:39], y[:39], probs[:39], torch.ones(()), E4M3.dtype, None, None, E5M2.dtype)
