"""The Triton cast bit for bit against its twin: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.choices import each_once
from helpers.numerics import codes, every_bf16, make, random_floats
from msamp.kernels.reference.cast import cast as twin
from msamp.numerics.formats import BF16, E4M3, E5M2

every_fp8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
RAGGED = [(1, 1), (3, 5), (16, 16), (17, 129), (130, 63), (1, 8193)]


def kernel(*args):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.cast").cast(*args)


def assert_same(x: torch.Tensor, scale: float, fmt) -> None:
    scale_t = torch.tensor(scale, device=x.device)
    got, want = kernel(x, scale_t, fmt.dtype), twin(x, scale_t, fmt.dtype)
    assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
    assert got.is_contiguous()
    assert codes(got).equal(codes(want))
    assert scale_t == scale, "the scale is only read"


@each_once(fmt=[E4M3, E5M2], dtype=[torch.float32, torch.bfloat16, torch.float16], shape=RAGGED)
def test_ragged_shapes(fmt, dtype, shape, triton_device):
    assert_same(make("log-normal", shape, device=triton_device).to(dtype), 4.0, fmt)


@every_fp8
@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-3, 1.0, 2.0**14, 2.0**126])
def test_random_bits_of_all_magnitudes(fmt, scale, triton_device):
    assert_same(random_floats(20_000, seed=7).view(100, 200).to(triton_device), scale, fmt)


@every_fp8
def test_every_bf16_value(fmt, triton_device):
    assert_same(every_bf16().view(256, 256).to(triton_device), 1.0, fmt)


@every_fp8
def test_ties_go_to_even_and_carries_are_kept(fmt, triton_device):
    grid = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    grid = grid[grid.isfinite()].unique()
    x = torch.cat([(grid[1:] + grid[:-1]) / 2, grid, torch.tensor([34.0, -31.25, 0.0, -0.0])])
    assert_same(x.view(1, -1).to(triton_device), 1.0, fmt)


@every_fp8
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_saturates_or_stays_nan(fmt, bad, triton_device):
    x = make("normal", (40, 300), device=triton_device)
    x[39, 299] = bad
    assert_same(x, 2.0, fmt)


@every_fp8
def test_negative_zero_keeps_its_sign(fmt, triton_device):
    x = torch.tensor([[-0.0, 0.0, -1e-30]], device=triton_device)
    assert codes(kernel(x, torch.ones((), device=triton_device), fmt.dtype)).tolist() == [[0x80, 0, 0x80]]
    assert_same(x, 1.0, fmt)


def test_strided_inputs(triton_device):
    x = make("normal", (64, 96), device=triton_device)
    assert_same(x.t(), 2.0, E4M3)
    assert_same(x[::2, 1::3], 2.0, E4M3)


def test_no_rows(triton_device):
    assert kernel(torch.empty(0, 16, device=triton_device), torch.ones((), device=triton_device), E4M3.dtype).shape == (0, 16)


@every_dtype
@pytest.mark.parametrize("scale", [0.37, 1.0, 2.0**100])
def test_products_rounded_to_bf16(dtype, scale, triton_device):
    """Also halves between two BF16 values, carries into the exponent, what becomes infinite, and no multiple of a block."""
    ties = torch.tensor([1.00390625, 1.01171875, -1.99609375, 3.0e38, 0.0, -0.0, float("inf")])
    x = torch.cat([ties, random_floats(9_000, seed=5), make("channel-outlier", (33, 40)).flatten()]).to(dtype).view(1, -1).to(triton_device)
    x = x.nan_to_num(nan=1.0, posinf=float("inf"), neginf=-float("inf"))
    if not x.is_cuda:  # the interpreter is wrong in BF16's subnormals
        x = x.masked_fill((x.abs().float() < 2.0**-120) & (x != 0), 1.0)
    scale_t = torch.tensor(scale, device=triton_device)
    got, want = kernel(x, scale_t, BF16.dtype), twin(x, scale_t, BF16.dtype)
    assert got.dtype == torch.bfloat16
    assert got.shape == x.shape
    assert got.view(torch.int16).equal(want.view(torch.int16))
    assert got.equal(torch.mul(x.float(), scale_t).bfloat16())


@pytest.mark.gpu
@every_fp8
@every_dtype
def test_large_on_the_gpu(fmt, dtype):
    x = (torch.randn(8192, 6151, device="cuda") * 100).to(dtype)
    assert_same(x, 2.0, fmt)


@pytest.mark.gpu
def test_more_elements_than_int32_counts():
    x = torch.zeros(2**16 + 1, 2**15, device="cuda", dtype=torch.bfloat16)
    x[-1, -1] = -300.0
    y = kernel(x, torch.ones((), device="cuda"), E4M3.dtype)
    assert y[-1, -8:].float().tolist() == [0.0] * 7 + [-288.0]
