"""The Triton cast of all experts bit for bit against its twin: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.agreement import assert_codes
from helpers.choices import each_once
from helpers.numerics import bits, make
from msamp.kernels.reference.expert_cast import expert_cast as twin
from msamp.numerics.formats import E4M3

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy, for the interpreter


def kernel(*args):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.expert_cast").expert_cast(*args)


def assert_same(payload: torch.Tensor) -> None:
    stored = 2.0 ** torch.arange(payload.shape[0], device=payload.device).float()
    got, want = kernel(payload, stored, E4M3.dtype), twin(payload, stored, E4M3.dtype)
    assert_codes(got[0], want[0])
    assert_codes(got[1], want[1])
    assert bits(got[2]).equal(bits(want[2]))


@each_once(shape=[(3, 20, 36), (2, 132, 66), (1, 8, 7), (4, 128, 64)], dtype=[torch.float16, torch.float32, torch.bfloat16, E4M3.dtype])
def test_shapes_and_dtypes(shape, dtype, triton_device):
    assert_same((make("normal", shape, device=triton_device) * 3).to(dtype))


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_an_expert_of_zeros_or_with_a_bad_value(bad, triton_device):
    x = make("normal", (3, 8, 16), device=triton_device)
    x[1] = 0.0
    x[1, 3, 3] = bad
    assert_same(x)


@pytest.mark.parametrize("shape", [(2, 0, 16), (2, 8, 0)], ids=str)
def test_nothing_to_cast(shape, triton_device):
    assert_same(torch.empty(shape, device=triton_device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, E4M3.dtype], ids=str)
def test_large_on_the_gpu(dtype):
    assert_same(torch.randn((16, 2048, 1024), device="cuda").to(dtype))
