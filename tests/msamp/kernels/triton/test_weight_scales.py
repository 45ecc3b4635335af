"""The Triton weight_scales bit for bit against its twin: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.choices import every_pair
from helpers.numerics import KINDS, bits, make
from msamp.kernels.reference.scale_from_amax import weight_scales as twin
from msamp.numerics.formats import E4M3, E5M2


def assert_same(payload: torch.Tensor, scale_inv: float, fp_max: float = E4M3.max) -> None:
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    kernel = importlib.import_module("msamp.kernels.triton.scale_from_amax").weight_scales
    stored = torch.tensor(scale_inv, device=payload.device)
    for got, want in zip(kernel(payload, stored, fp_max), twin(payload, stored, fp_max), strict=True):
        assert got.shape == ()
        assert got.data_ptr() % 16 == 0, "as cuBLAS wants it"
        assert bits(got).equal(bits(want))


@every_pair
@pytest.mark.parametrize("fp_max", [E4M3.max, E5M2.max])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_any_format(kind, dtype, fp_max, triton_device):
    assert_same(make(kind, (96, 80), device=triton_device).to(dtype), 2.0**-9, fp_max)


@pytest.mark.parametrize("shape", [(1, 1), (7,), (0, 4), (300, 257), (3, 32768)])
def test_one_program_and_several(shape, triton_device):
    x = torch.zeros(shape, dtype=torch.float16, device=triton_device)
    if x.numel():
        x.view(-1)[-1] = -3.5  # the largest comes last
    assert_same(x, 1.0)


@pytest.mark.parametrize("worst", [0.0, float("nan"), float("inf"), -float("inf"), 65504.0, 2.0**-24])
def test_the_ends_of_both_ranges(worst, triton_device):
    x = torch.zeros(40, 40, dtype=torch.float16, device=triton_device)
    x[3, 5] = worst
    for scale_inv in (1.0, 2.0**-126, 2.0**120, float("nan")):
        assert_same(x, scale_inv)


def test_a_strided_weight(triton_device):
    assert_same(make("normal", (33, 20), device=triton_device).half().t(), 0.25)
