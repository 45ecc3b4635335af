"""The Triton cast+transpose bit for bit against its twin: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch
from numerics import bits, codes, make, random_floats

from msamp.kernels.reference.cast_transpose import cast_transpose as twin
from msamp.numerics.formats import E4M3, E5M2

every_fp8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def kernel(*args):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.cast_transpose").cast_transpose(*args)


def assert_same(x: torch.Tensor, scale: float, fmt, slot: float | None = 0.0) -> None:
    scale_t = torch.tensor(scale, device=x.device)
    slots = [None if slot is None else torch.tensor(slot, device=x.device) for _ in range(2)]
    got, want = kernel(x, scale_t, slots[0], fmt.dtype), twin(x, scale_t, slots[1], fmt.dtype)
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape, g.device) == (w.dtype, w.shape, w.device)
        assert g.is_contiguous()
        assert codes(g).equal(codes(w))
    if slot is not None:
        assert bits(slots[0]).equal(bits(slots[1]))


@every_fp8
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 16), (128, 64), (129, 65), (127, 191), (300, 7)], ids=str)
def test_ragged_shapes(fmt, dtype, shape, triton_device):
    assert_same(make("log-normal", shape, device=triton_device).to(dtype), 4.0, fmt)


@every_fp8
@pytest.mark.parametrize("scale", [2.0**-126, 1.0, 2.0**126])
def test_random_bits_of_all_magnitudes(fmt, scale, triton_device):
    assert_same(random_floats(20_000, seed=8).view(200, 100).to(triton_device), scale, fmt)


@pytest.mark.parametrize("old", [0.0, 2.0, 1e30])
def test_the_slot_is_raised_to_the_amax(old, triton_device):
    assert_same(make("normal", (200, 100), device=triton_device), 1.0, E4M3, slot=old)


@every_fp8
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -0.0])
def test_special_values(fmt, bad, triton_device):
    x = make("normal", (130, 70), device=triton_device)
    x[129, 69] = x[0, 0] = bad
    assert_same(x, 2.0, fmt, slot=1.0)


def test_strided_inputs_and_no_slot(triton_device):
    x = make("normal", (64, 96), device=triton_device)
    assert_same(x.t(), 2.0, E4M3)
    assert_same(x[::2, 1::3], 2.0, E4M3, slot=None)


def test_no_rows(triton_device):
    y, yt = kernel(torch.empty(0, 16, device=triton_device), torch.ones((), device=triton_device), None, E4M3.dtype)
    assert (y.shape, yt.shape) == ((0, 16), (16, 0))


@pytest.mark.gpu
@every_fp8
@every_dtype
def test_large_on_the_gpu(fmt, dtype):
    assert_same((torch.randn(8192, 6151, device="cuda") * 100).to(dtype), 2.0, fmt)
