"""The Triton activations against their twins: under the interpreter here, compiled on a GPU.

exp differs in its last bits between the two, so a code may be its neighbour. The activation made again in backward is compared with
that of forward bit for bit: both are the kernel's.
"""

import functools
import importlib

import pytest
import torch

from helpers.agreement import assert_codes, assert_no_worse, assert_plain, assert_sums
from helpers.choices import each_once, every_pair, every_value
from helpers.numerics import KINDS, codes, make
from msamp.kernels.reference import activate as twin
from msamp.numerics.formats import E4M3, E5M2

SHARE = 1e-3  # of codes that may be a neighbour: BF16 inputs lie exactly between two codes where the activation is nearly the identity
RAGGED = [(1, 2, torch.float32), (3, 5, torch.float16), (32, 64, torch.float32), (130, 65, torch.bfloat16), (9, 270, torch.bfloat16)]
CASES = [(kind, *case) for kind in ("gelu", "swiglu", "squared-relu") for case in RAGGED]
NIGHTLY = pytest.mark.nightly
both = pytest.mark.parametrize("kind", ["gelu", "swiglu", "squared-relu"])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_scale = pytest.mark.parametrize("scale", [None, 2.0])
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy, for the interpreter


def kernel(name: str, *args, **flags):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return getattr(importlib.import_module("msamp.kernels.triton.activate"), name)(*args, **flags)


def inputs(kind: str, shape: tuple[int, int], device, dtype=torch.bfloat16, values="log-normal") -> tuple[torch.Tensor, torch.Tensor]:
    """(grad_a [M, F], y [M, F or 2F])."""
    y = make(values, (shape[0], shape[1] * (2 if kind == "swiglu" else 1)), device=device).clamp(-1e4, 1e4)
    return make("normal", shape, seed=1, device=device).to(dtype), y.to(dtype)


def pair(old: float, device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(old, device=device), torch.tensor(old, device=device)


def assert_same_forward(y: torch.Tensor, kind: str, scale: float | None, fmt=E4M3, slot: float = 0.0) -> None:
    scale_t, slots = None if scale is None else torch.tensor(scale, device=y.device), pair(slot, y.device)
    a, scale_inv = kernel("activate", y, kind, scale_t, slots[0], fmt.dtype)
    want, want_inv = twin.activate(y, kind, scale_t, slots[1], fmt.dtype)
    assert_codes(a, want, SHARE)
    assert scale_inv.equal(want_inv)
    torch.testing.assert_close(*slots, rtol=1e-5, atol=0.0)


def assert_same_backward(grad_a: torch.Tensor, y: torch.Tensor, kind: str, scale: float | None, fmt=E5M2, a_fmt=E4M3) -> None:
    a, a_scale_inv = kernel("activate", y, kind, None, None, a_fmt.dtype)
    scale_t, slots = None if scale is None else torch.tensor(scale, device=y.device), pair(0.0, y.device)
    results = [
        function(grad_a, y, kind, a_scale_inv, a_fmt.dtype, scale_t, slot, fmt.dtype, colsum=True)
        for function, slot in zip((functools.partial(kernel, "activate_backward"), twin.activate_backward), slots, strict=True)
    ]
    (g, g_t, scale_inv, a_t, sums), want = results
    assert_codes(g, want[0], SHARE)
    assert (g_t.shape, g_t.is_contiguous(), a_t.shape, a_t.is_contiguous()) == (g.shape[::-1], True, a.shape[::-1], True)
    assert codes(g_t).equal(codes(g).t())
    assert codes(a_t).equal(codes(a).t()), "backward makes forward's codes again"
    assert scale_inv.equal(want[2])
    plain = twin.activate_backward(grad_a, y, kind, a_scale_inv, a_fmt.dtype, None, None, torch.float32)[0]
    assert_sums(sums.sum(0), want[4].sum(0), plain.abs().sum(0))
    torch.testing.assert_close(*slots, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(  # under the interpreter a program takes as long as a launch on a GPU: each shape with one of the two
    ("kind", "rows", "features", "dtype"),
    [pytest.param(*case, marks=[NIGHTLY] * (i in (1, 3, 5, 7, 9))) for i, case in enumerate(CASES)],
    ids=str,
)
def test_ragged_shapes(kind, rows, features, dtype, triton_device):
    grad_a, y = inputs(kind, (rows, features), triton_device, dtype)
    assert_same_forward(y, kind, 2.0)
    assert_same_backward(grad_a, y, kind, 2.0)


@both
def test_one_token_one_feature(kind, triton_device):
    if triton_device.type == "cuda" and kind == "gelu":
        pytest.xfail("Triton 3.6 on an H200 leaves out the store of a gradient of one element: no GEMM takes one unpadded")
    grad_a, y = inputs(kind, (1, 1), triton_device, torch.float32)
    assert_same_forward(y, kind, 2.0)
    assert_same_backward(grad_a, y, kind, 2.0)


@pytest.mark.parametrize(
    ("kind", "scale"),
    [
        ("gelu", 2.0),
        ("swiglu", None),
        ("squared-relu", 2.0),
        *(pytest.param(*case, marks=NIGHTLY) for case in (("gelu", None), ("swiglu", 2.0))),
    ],
)
def test_formats_scales_and_slots(kind, scale, triton_device):
    grad_a, y = inputs(kind, (64, 60), triton_device)
    assert_same_forward(y, kind, scale, slot=0.5)
    assert_same_forward(y, kind, scale, fmt=E5M2)
    assert_same_backward(grad_a, y, kind, scale)
    assert_same_backward(grad_a, y, kind, scale, fmt=E4M3, a_fmt=E5M2)


@both
@pytest.mark.parametrize("values", [pytest.param(values, marks=[NIGHTLY] * (values == "normal")) for values in KINDS])
def test_no_worse_than_the_twin(kind, values, triton_device):
    grad_a, y = inputs(kind, (64, 128), triton_device, values=values)
    a, scale_inv = kernel("activate", y, kind, None, None, E4M3.dtype)
    exact = twin.activate(y, kind, None, None, torch.float32)[0]
    assert_no_worse(exact, a, scale_inv, E4M3, twin.activate(y, kind, None, None, E4M3.dtype)[0])
    fixed = (kind, scale_inv, E4M3.dtype, None, None)
    g, _, g_scale_inv, _, _ = kernel("activate_backward", grad_a, y, *fixed, E5M2.dtype)
    exact = twin.activate_backward(grad_a, y, *fixed, torch.float32)[0]
    assert_no_worse(exact, g, g_scale_inv, E5M2, twin.activate_backward(grad_a, y, *fixed, E5M2.dtype)[0])


@each_once(kind=["gelu", "swiglu", "squared-relu"], dtype=DTYPES)
def test_plain_results(kind, dtype, triton_device):
    grad_a, y = inputs(kind, (37, 70), triton_device, dtype, values="normal")
    slot, one = torch.zeros((), device=y.device), torch.ones((), device=y.device)
    a, empty = kernel("activate", y, kind, None, slot, dtype)
    assert_plain(a, twin.activate(y, kind, None, None, dtype)[0])
    g, g_t, scale_inv, a_t, sums = kernel("activate_backward", grad_a, y, kind, one, E4M3.dtype, None, slot, dtype, colsum=True)
    want = twin.activate_backward(grad_a, y, kind, one, E4M3.dtype, None, None, dtype, colsum=True)
    assert_plain(g, want[0], terms=torch.cat([grad_a] * (g.shape[1] // grad_a.shape[1]), dim=1).float() * 8)
    exact = twin.activate_backward(grad_a, y, kind, one, E4M3.dtype, None, None, torch.float32)[0]
    assert_sums(sums.sum(0), want[4].sum(0), exact.abs().sum(0))
    assert [t.numel() for t in (empty, g_t, scale_inv, a_t)] == [0, 0, 0, 0]
    assert slot == 0


@every_value
@both
@pytest.mark.parametrize(
    ("bad", "place", "scale"),
    [(float("nan"), 0, None), (float("inf"), 1, 2.0), (float("inf"), 2, None), (float("nan"), 3, 2.0)],
)
def test_what_is_not_finite_shows(kind, scale, bad, place, triton_device):
    scale = None if scale is None else torch.tensor(scale, device=triton_device)
    grad_a, y = inputs(kind, (24, 40), triton_device)
    slot, one = torch.zeros((), device=y.device), torch.ones((), device=y.device)
    grad_a[16 + place, 3] = bad
    assert kernel("activate_backward", grad_a, y, kind, one, E4M3.dtype, scale, slot, E5M2.dtype)[2].isnan()
    assert slot.isinf()
    y[16 + place, -1] = bad
    assert kernel("activate", y, kind, scale, slot.zero_(), E4M3.dtype)[1].isnan()
    assert slot.isinf()


def test_strided_inputs_and_no_rows(triton_device):
    grad_a, y = inputs("gelu", (40, 48), triton_device)
    assert_same_backward(grad_a.t(), y.t(), "gelu", 2.0)
    assert_same_forward(y.t(), "gelu", 2.0)
    assert_same_backward(grad_a[:0], y[:0], "gelu", 2.0)


@every_pair
@pytest.mark.gpu
@both
@every_scale
@pytest.mark.parametrize("shape", [(8192, 8192), (4099, 5504)], ids=str)
def test_large_on_the_gpu(kind, scale, shape):
    y = torch.randn(shape[0], shape[1] * (2 if kind == "swiglu" else 1), device="cuda").bfloat16()
    grad_a = torch.randn(shape, device="cuda").bfloat16()
    assert_same_forward(y, kind, scale)
    assert_same_backward(grad_a, y, kind, scale)


@pytest.mark.gpu
@both
def test_results_repeat(kind):
    grad_a, y = inputs(kind, (2048, 1024), "cuda")
    one = torch.ones((), device="cuda")
    first, second = (
        kernel("activate_backward", grad_a, y, kind, one, E4M3.dtype, None, None, E5M2.dtype, colsum=True)[4] for _ in range(2)
    )
    assert first.equal(second)


@pytest.mark.parametrize("features", [pytest.param(60, marks=pytest.mark.nightly), 270])
def test_channel_scales_and_amaxes_of_channels(features, triton_device):
    grad_a, y = inputs("swiglu", (37, features), triton_device)
    by = torch.tensor([2.0 ** (k % 9) for k in range(features)], device=triton_device)
    scale, slots = torch.tensor(0.5, device=triton_device), pair(0.0, triton_device)
    channels = [torch.full((features,), 0.25, device=triton_device) for _ in slots]
    (a, scale_inv), (want, want_inv) = (
        function(y, "swiglu", scale, slot, E4M3.dtype, channel_scale=by, channel_amax_slot=maxima)
        for function, slot, maxima in zip((functools.partial(kernel, "activate"), twin.activate), slots, channels, strict=True)
    )
    assert_codes(a, want, SHARE)
    assert scale_inv.equal(want_inv)
    torch.testing.assert_close(*slots, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(*channels, rtol=1e-5, atol=0.0)
    assert float(channels[0].max()) == float(slots[0]), "amaxes are those before the channels' scales"
    made = kernel("activate_backward", grad_a, y, "swiglu", scale_inv, E4M3.dtype, None, None, E5M2.dtype, channel_scale=by)
    assert codes(made[3]).equal(codes(a).t()), "backward makes forward's codes again"
    plain = kernel("activate_backward", grad_a, y, "swiglu", scale_inv, E4M3.dtype, None, None, E5M2.dtype)
    assert codes(made[0]).equal(codes(plain[0])), "the gradient does not depend on them"


def test_a_channel_that_is_not_finite_has_an_infinite_amax(triton_device):
    y = torch.ones(5, 8, device=triton_device)
    y[3, 1] = float("nan")
    maxima = torch.zeros(4, device=triton_device)
    kernel("activate", y, "swiglu", torch.ones((), device=triton_device), None, E4M3.dtype, channel_amax_slot=maxima)
    assert maxima.isinf().tolist() == [False, True, False, False]
