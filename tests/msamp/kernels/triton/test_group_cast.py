"""The Triton cast in groups bit for bit against its twin, both ways: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.choices import each_once
from helpers.numerics import bits, codes, every_bf16, make, random_floats
from msamp.kernels.reference import group_cast as twin
from msamp.numerics.formats import E4M3, E5M2

every_fp8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy, for the interpreter
RAGGED = [(1, 1), (3, 5), (16, 16), (17, 129), (130, 63), (1, 8193)]


def kernel(name: str, *args):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return getattr(importlib.import_module("msamp.kernels.triton.group_cast"), name)(*args)


def without_subnormals(x: torch.Tensor) -> torch.Tensor:
    """`x` with zeros for BF16's subnormals, which Triton's interpreter converts wrongly, both ways."""
    return x if x.dtype != torch.bfloat16 or x.is_cuda else x.masked_fill(x.abs() < 2.0**-126, 0.0)


def assert_same(x: torch.Tensor, size: int, fmt) -> None:
    got, want = kernel("group_cast", x, size, fmt.dtype), twin.group_cast(x, size, fmt.dtype)
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape, g.device, g.is_contiguous()) == (w.dtype, w.shape, w.device, True)
    assert got[1].equal(want[1])
    finite = (want[1] != twin.NOT_FINITE).repeat_interleave(size, 1)[:, : x.shape[1]].cpu()
    # The rest of a group that is not finite is decoded as NaN, whatever the sign of its NaN's code.
    assert codes(got[0])[finite].equal(codes(want[0])[finite])
    for dtype in (torch.float32, torch.bfloat16):
        back, expected = kernel("group_decode", *got, size, dtype), twin.group_decode(*want, size, dtype)
        assert back.isnan().equal(expected.isnan())
        back, expected = (without_subnormals(x.nan_to_num(0.5)) for x in (back, expected))
        assert bits(back).equal(bits(expected))


@each_once(fmt=[E4M3, E5M2], dtype=[torch.float32, torch.bfloat16, torch.float16], shape=RAGGED)
def test_ragged_shapes(fmt, dtype, shape, triton_device):
    assert_same(make("log-normal", shape, device=triton_device).to(dtype), 16, fmt)


@every_fp8
@pytest.mark.parametrize("size", [1, 32, 128])
def test_sizes_of_groups(fmt, size, triton_device):
    assert_same(make("channel-outlier", (37, 200), device=triton_device), size, fmt)


@every_fp8
def test_random_bits_of_all_magnitudes(fmt, triton_device):
    x = random_floats(20_000, seed=7)
    assert_same(x.view(100, 200).to(triton_device), 16, fmt)
    assert_same(x.sort().values.view(100, 200).to(triton_device), 16, fmt)


@every_fp8
def test_every_bf16_value(fmt, triton_device):
    assert_same(without_subnormals(every_bf16().view(256, 256).to(triton_device)), 16, fmt)


def test_zeros_no_rows_and_a_transposed_input(triton_device):
    assert_same(torch.zeros(3, 40, device=triton_device), 16, E4M3)
    assert_same(torch.zeros(0, 40, device=triton_device), 16, E4M3)
    assert_same(make("normal", (40, 24), device=triton_device).t(), 16, E4M3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 8192), (4099, 5504)], ids=str)
def test_large_on_the_gpu(shape):
    assert_same(make("log-normal", shape, device="cuda").bfloat16(), 16, E4M3)
