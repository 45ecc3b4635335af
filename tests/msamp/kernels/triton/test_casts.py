"""The Triton cast with divided columns bit for bit against its twin: under the interpreter here, compiled on a GPU."""

import importlib
from pathlib import Path

import pytest
import torch

from helpers.numerics import codes, make
from msamp.kernels.reference.cast_transpose import cast_columns as twin
from msamp.kernels.tables import Tables
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.quantize import quantize


def kernel(*args):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.cast_transpose").cast_columns(*args)


def assert_same(x: torch.Tensor, scale: float | None, dtype: torch.dtype = E4M3.dtype) -> None:
    by = torch.tensor([2.0 ** (k % 9) for k in range(x.shape[1])], device=x.device)
    scale_t = None if scale is None else torch.tensor(scale, device=x.device)
    got, want = kernel(x, scale_t, by, dtype), twin(x, scale_t, by, dtype)
    assert (got.dtype, got.shape, got.device, got.is_contiguous()) == (want.dtype, want.shape, want.device, True)
    if dtype.itemsize == 1:
        assert codes(got).equal(codes(want))
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("shape", "dtype"), [((1, 1), torch.float32), ((17, 129), torch.bfloat16), ((3, 515), torch.float16)], ids=str)
def test_ragged_shapes(shape, dtype, triton_device):
    assert_same(make("log-normal", shape, device=triton_device).to(dtype), 4.0)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_every_code_of_a_stored_weight(fmt, triton_device):
    every = torch.arange(256, dtype=torch.uint8).view(1, 256).expand(9, 256).contiguous().view(fmt.dtype).to(triton_device)
    assert_same(every, None, fmt.dtype)
    assert_same(quantize(make("normal", (20, 40), device=triton_device), 64.0, fmt), 0.5, fmt.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_keeps_its_dtype(dtype, triton_device):
    x = make("log-normal", (17, 515), device=triton_device).to(dtype)
    x[3, 1], x[2, 7] = float("inf"), float("nan")
    assert_same(x, None, dtype)


def test_empty_and_not_finite(triton_device):
    assert kernel(torch.ones(0, 4, device=triton_device), None, torch.ones(4, device=triton_device), E4M3.dtype).shape == (0, 4)
    x = make("normal", (4, 20), device=triton_device)
    x[3, 1], x[2, 7] = float("inf"), float("nan")
    assert_same(x, 2.0)


# Stores of the Triton kernels against the golden vectors; against their twin, bit for bit: test_adamw.py.


def reference_tests():
    spec = importlib.util.spec_from_file_location("reference_test_store", Path(__file__).parents[1] / "reference" / "test_store.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_of_adamw_are_the_golden_ones(triton_device):
    if torch.device(triton_device).type == "cuda":
        pytest.skip("the golden steps have a CPU's order of operations; on a GPU the kernel is compared with its twin")
    kernel = importlib.import_module("msamp.kernels.triton.adamw").adamw
    reference_tests().check_golden(kernel, Tables(torch.device(triton_device)))
