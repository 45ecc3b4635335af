"""The Triton sum of squares bit for bit against its twin: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch
from numerics import make

from msamp.kernels.reference.square_sum import square_sum as twin
from msamp.numerics.formats import E4M3, E5M2


def kernel(*args):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.square_sum").square_sum(*args)


@pytest.mark.parametrize("kind", ["normal", "channel-outlier", "log-normal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3.dtype, E5M2.dtype], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (17, 129), (130, 63), (3, 8193)], ids=str)
def test_as_its_twin(kind, dtype, shape, triton_device):
    x = make(kind, shape, device=triton_device).clamp(-400, 400).to(dtype)
    factor = (1 / (3 * x.float().abs().max().double())).reshape(())  # no power of two
    assert kernel(x, factor, 2.0**46).equal(twin(x, factor, 2.0**46))


def test_empty(triton_device):
    x = torch.empty(0, 4, device=triton_device)
    assert kernel(x, torch.ones((), dtype=torch.float64, device=triton_device), 2.0**40).tolist() == [0, 0]


@pytest.mark.gpu
def test_a_large_tensor():
    x = make("log-normal", (4096, 3000), device="cuda")
    factor = (1 / x.abs().max().double()).reshape(())
    assert kernel(x, factor, 2.0**33).equal(twin(x, factor, 2.0**33))
