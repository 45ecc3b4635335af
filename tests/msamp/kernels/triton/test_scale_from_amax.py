"""The Triton scale_from_amax bit for bit against its twin: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.numerics import bits, random_floats
from msamp.kernels.reference.scale_from_amax import scale_from_amax as twin
from msamp.kernels.reference.scale_from_amax import scale_from_maxima
from msamp.numerics.formats import E4M3, E5M2, FP16


def kernel(*args, name="scale_from_amax"):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return getattr(importlib.import_module("msamp.kernels.triton.scale_from_amax"), name)(*args)


def assert_same(amax: torch.Tensor, fp_max: float, last: torch.Tensor | None, otherwise: float) -> None:
    got, want = kernel(amax, fp_max, last, otherwise), twin(amax, fp_max, last, otherwise)
    assert got.shape == want.shape
    assert bits(got).equal(bits(want))


@pytest.mark.parametrize("fp_max", [E4M3.max, E5M2.max, FP16.max, 1.0])
def test_random_bits_of_all_magnitudes(fp_max, triton_device):
    amax = random_floats(3000, seed=9).to(triton_device)
    assert_same(amax.view(2, 1500), fp_max, None, 2.0**126)
    assert_same(amax, fp_max, torch.rand(3000, device=triton_device), 1.0)


def test_values_next_to_a_power_of_two_and_no_amax(triton_device):
    special = [0.0, -0.0, -1.0, float("inf"), -float("inf"), float("nan"), 2.0**-149, 3.4e38, 448.0, 1.75, 3.5, 1.0]
    amax = torch.tensor(special, device=triton_device)
    around = torch.cat([amax, torch.nextafter(amax, torch.zeros_like(amax)), torch.nextafter(amax, amax + 1)])
    for otherwise in (1.0, 2.0**126):
        assert_same(around, E4M3.max, None, otherwise)


def test_one_amax_and_none(triton_device):
    assert_same(torch.tensor(3.0, device=triton_device), E5M2.max, None, 1.0)
    assert_same(torch.tensor(0.0, device=triton_device), E5M2.max, torch.tensor(0.25, device=triton_device), 1.0)
    assert kernel(torch.empty(0, device=triton_device), E5M2.max, None, 1.0).shape == (0,)


@pytest.mark.parametrize("fp_max", [E4M3.max, E5M2.max])
@pytest.mark.parametrize("count", [1, 264, 1025, 5000])
def test_one_scale_of_all_maxima(count, fp_max, triton_device):
    for last in (2.0**-140, 1.75, 3e30, 0.0, float("inf"), float("nan")):
        maxima = torch.zeros(count, 1, device=triton_device)
        maxima[count // 2], maxima[-1] = 2.0**-149, last  # the largest comes last, behind whole blocks of others
        got, want = kernel(maxima, fp_max, name="scale_from_maxima"), scale_from_maxima(maxima, fp_max)
        assert got.shape == want.shape == ()
        assert bits(got).equal(bits(want))


def test_no_maxima(triton_device):
    assert kernel(torch.empty(0, 1, device=triton_device), E5M2.max, name="scale_from_maxima") == 1.0
