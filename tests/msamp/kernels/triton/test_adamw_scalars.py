"""Scales of new moments, from bounds of what they will hold; every other number is compared with the twin in test_adamw.py."""

import importlib

import pytest
import torch

from helpers.adamw_inputs import adamw_batch, hyper
from msamp.kernels.tables import Tables
from msamp.numerics.formats import E4M3, FP16
from msamp.numerics.tensor import ScalingTensor

KEPT = 0.25


def scales(bound: float, device) -> list[float]:
    """scale_inv of m in E4M3 and of v in FP16 after a step without gradient, where beta times their amax is `bound`."""
    beta1, beta2 = 0.5, 0.5
    zeros = [ScalingTensor.quantize(torch.zeros(5, device=device), fmt, dtype=torch.float32) for fmt in (E4M3, FP16)]
    for state in zeros:
        state.scale_inv.fill_(KEPT)
    x = adamw_batch([torch.zeros(5, device=device)], zeros[:1], zeros[1:], [torch.ones(5, device=device)])
    amaxes = torch.tensor([[0.0], [2 * bound], [2 * bound], [1.0], [0.0]], device=device)
    kept = torch.zeros(3, 1, device=device)
    adamw = importlib.import_module("msamp.kernels.triton.adamw").adamw  # late: the file takes the interpreter or the compiler
    numbers = hyper(device, beta1=beta1, beta2=beta2)
    adamw(Tables(torch.device(device)), x, numbers, amaxes, kept, None, torch.tensor(True, device=device), decoupled=True)
    return [float(state.scale_inv) for state in zeros]


@pytest.mark.parametrize("bound", [2.0**-30, 1e-3, 1.0, 447.0, 448.0, 449.0, 1e6])
def test_a_scale_is_the_largest_power_of_two_that_keeps_the_bound_in_range(bound, triton_device):
    for scale_inv, largest in zip(scales(bound, triton_device), (448.0, 65504.0), strict=True):
        assert largest * scale_inv / 2 < torch.tensor(bound) <= largest * scale_inv
        assert torch.frexp(torch.tensor(scale_inv)).mantissa == 0.5


@pytest.mark.parametrize("bound", [0.0, float("inf"), float("nan")])
def test_a_bound_of_zero_or_beyond_fp32_leaves_the_scale(bound, triton_device):
    assert scales(bound, triton_device) == [KEPT, KEPT]
