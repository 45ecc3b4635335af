"""The Triton SwiGLU of experts against its twin: under the interpreter here, compiled on a GPU. exp differs in its last bits, so a code may
be its neighbour; the activation made again in backward is compared with that of forward bit for bit."""

import importlib

import pytest
import torch

from helpers.agreement import assert_codes
from helpers.choices import each_once
from helpers.numerics import codes, make
from msamp.kernels.reference import expert_swiglu as twin
from msamp.numerics.formats import E4M3, E5M2

SHARE = 1e-3
RAGGED = [(4, 5, torch.float16), (132, 65, torch.bfloat16), (32, 64, torch.float32), (8, 270, torch.bfloat16)]
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy, for the interpreter


def kernel(name: str, *args, **flags):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return getattr(importlib.import_module("msamp.kernels.triton.expert_swiglu"), name)(*args, **flags)


def assert_same(rows: int, width: int, dtype: torch.dtype, scale: float | None, device) -> None:
    y = make("log-normal", (rows, 2 * width), device=device).clamp(-1e4, 1e4).to(dtype)
    grad_a, probs = make("normal", (rows, width), seed=1, device=device).to(dtype), torch.rand(rows, device=device)
    scale_t = None if scale is None else torch.tensor(scale, device=device)
    slots = torch.zeros(4, device=device).unbind()
    a, a_scale_inv = kernel("expert_swiglu", y, probs, scale_t, slots[0], E4M3.dtype)
    want_a, want_inv = twin.expert_swiglu(y, probs, scale_t, slots[1], E4M3.dtype)
    assert_codes(a, want_a, SHARE)
    assert a_scale_inv.equal(want_inv)
    args = (grad_a, y, probs, a_scale_inv, E4M3.dtype, scale_t)
    g, g_t, scale_inv, a_t, parts = kernel("expert_swiglu_backward", *args, slots[2], E5M2.dtype)
    want = twin.expert_swiglu_backward(*args, slots[3], E5M2.dtype)
    assert_codes(g, want[0], SHARE)
    assert scale_inv.equal(want[2])
    assert codes(g_t).equal(codes(g).t())
    assert codes(a_t).equal(codes(a).t())
    terms = (grad_a.float() * twin._activation(y, "swiglu")).abs().sum(1)
    assert bool(((parts.sum(0) - want[4].sum(0)).abs() <= 1e-5 * terms + 1e-30).all())
    for got, expected in (slots[:2], slots[2:]):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=0.0)


@each_once(case=RAGGED, scale=[None, 2.0])
def test_ragged_shapes(case, scale, triton_device):
    assert_same(*case, scale, triton_device)


def test_a_wide_result(triton_device):
    y, probs = make("normal", (40, 96), device=triton_device).bfloat16(), torch.rand(40, device=triton_device)
    got, want = (f("expert_swiglu", y, probs, None, None, torch.float32)[0] for f in (kernel, lambda name, *a: getattr(twin, name)(*a)))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_one_bad_value_makes_the_scale_nan(triton_device):
    y, probs = make("normal", (8, 32), device=triton_device), torch.ones(8, device=triton_device)
    y[3, 20] = float("nan")
    one = torch.ones((), device=triton_device)
    assert kernel("expert_swiglu", y, probs, one, None, E4M3.dtype)[1].isnan()
    grad_a = torch.ones((8, 16), device=triton_device)
    assert kernel("expert_swiglu_backward", grad_a, y, probs, one, E4M3.dtype, one, None, E5M2.dtype)[2].isnan()


def test_no_rows(triton_device):
    y, probs, one = torch.empty((0, 32), device=triton_device), torch.empty(0, device=triton_device), torch.ones((), device=triton_device)
    assert kernel("expert_swiglu", y, probs, one, None, E4M3.dtype)[0].shape == (0, 16)
    shapes = [x.shape for x in kernel("expert_swiglu_backward", y[:, :16], y, probs, one, E4M3.dtype, one, None, E5M2.dtype)]
    assert shapes == [(0, 32), (32, 0), (), (16, 0), (1, 0)]


@pytest.mark.parametrize("scale", [pytest.param(None, marks=pytest.mark.nightly), 2.0])
def test_rows_beyond_the_end_are_left_out(scale, triton_device):
    rows, end = 384, torch.tensor([128], dtype=torch.int32, device=triton_device)
    y, grad_a = make("normal", (rows, 192), device=triton_device), make("normal", (rows, 96), seed=1, device=triton_device)
    probs, scale = torch.rand(rows, device=triton_device), None if scale is None else torch.tensor(scale, device=triton_device)
    amaxes = torch.zeros(4, device=triton_device).unbind()
    y[128:], grad_a[128:] = float("inf"), float("nan")
    forward, backward = ((E4M3.dtype,), (torch.ones((), device=triton_device), E4M3.dtype))
    a, scale_inv = kernel("expert_swiglu", y, probs, scale, amaxes[0], *forward, end=end)
    want, want_inv = kernel("expert_swiglu", y[:128], probs[:128], scale, amaxes[1], *forward)
    assert codes(a[:128]).equal(codes(want))
    assert scale_inv.equal(want_inv)
    got = kernel("expert_swiglu_backward", grad_a, y, probs, *backward, scale, amaxes[2], E5M2.dtype, end=end)
    wanted = kernel("expert_swiglu_backward", grad_a[:128], y[:128], probs[:128], *backward, scale, amaxes[3], E5M2.dtype)
    assert codes(got[0][:128]).equal(codes(wanted[0]))
    for number in (1, 3):
        assert codes(got[number][:, :128].contiguous()).equal(codes(wanted[number]))
    assert got[2].equal(wanted[2])
    assert got[4][:, :128].equal(wanted[4])
    assert amaxes[0] == amaxes[1] < float("inf")
    assert amaxes[2] == amaxes[3] < float("inf")


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 2.0])
def test_large_on_the_gpu(scale):
    assert_same(16384, 1024, torch.bfloat16, scale, "cuda")
    assert_same(4100, 768, torch.bfloat16, scale, "cuda")
