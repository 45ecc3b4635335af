"""The Triton transpose bit for bit against its twin: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.choices import every_value
from helpers.numerics import codes
from msamp.kernels.reference.cast_transpose import transpose as twin
from msamp.numerics.formats import E4M3, E5M2


def kernel(x: torch.Tensor) -> torch.Tensor:
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.cast_transpose").transpose(x)


def payload(shape: tuple[int, int], fmt, device) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8).to(device).view(fmt.dtype)


def assert_same(x: torch.Tensor) -> None:
    got, want = kernel(x), twin(x)
    assert (got.dtype, got.shape, got.device, got.is_contiguous()) == (want.dtype, want.shape, want.device, True)
    assert codes(got).equal(codes(want))


@every_value
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (3, 200), (128, 128), (131, 60), (160, 257), (0, 8), (8, 0)], ids=str)
def test_as_its_twin(fmt, shape, triton_device):
    assert_same(payload(shape, fmt, triton_device))


def test_a_strided_payload(triton_device):
    x = payload((40, 60), E4M3, triton_device)
    assert_same(x.t())
    assert_same(x[::2, 3:])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 2048), (2048, 6144), (4097, 1031)], ids=str)
def test_large_on_the_gpu(shape):
    assert_same(payload(shape, E4M3, "cuda"))
