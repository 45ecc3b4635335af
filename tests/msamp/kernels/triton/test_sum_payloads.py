"""The Triton sum of payloads against its twin, bit for bit: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.choices import every_pair
from helpers.numerics import KINDS, make
from msamp.kernels.reference.sums import sum_payloads as twin
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32


def kernel(*args):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.sums").sum_payloads(*args)


def assert_same(payloads, factor, dtype, *own) -> None:
    got, want = kernel(payloads, factor, dtype, *own), twin(payloads, factor, dtype, *own)
    assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
    a, b = got.float(), want.float()
    assert a.isnan().equal(b.isnan())
    assert a.nan_to_num(7.0).equal(b.nan_to_num(7.0))
    assert a.signbit()[~b.isnan()].equal(b.signbit()[~b.isnan()])


@every_pair
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("into", [E4M3, E5M2, BF16, FP32], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2, BF16, FP16, FP32], ids=str)
def test_it_is_its_twin(fmt, into, kind, triton_device):
    payloads = make(kind, (3, 5000), device=triton_device).clamp(-400, 400).to(fmt.dtype)
    assert_same(payloads, torch.tensor(2.0**-3, device=triton_device), into.dtype)


@pytest.mark.parametrize("shape", [(1, 1), (2, 4096), (4, 4097), (2, 0)], ids=str)
def test_every_shape(shape, triton_device):
    assert_same(make("normal", shape, device=triton_device).to(E5M2.dtype), None, torch.bfloat16)


@pytest.mark.parametrize("rank", range(3))
def test_the_own_part_stands_for_its_row(rank, triton_device):
    payloads = make("normal", (3, 5000), device=triton_device).to(E5M2.dtype)
    own, without = payloads[rank].clone(), payloads.clone()
    without[rank] = float("nan")
    assert_same(without, None, torch.bfloat16, own, rank)
    assert kernel(without, None, torch.float32, own, rank).equal(kernel(payloads, None, torch.float32))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_every_code_and_what_is_not_finite(fmt, triton_device):
    codes = torch.arange(256, dtype=torch.uint8, device=triton_device).repeat(2, 1).view(fmt.dtype)
    assert_same(codes, None, torch.float32)
    assert_same(codes, None, fmt.dtype)


@pytest.mark.gpu
def test_what_two_ranks_send_of_a_layer():
    assert_same(make("normal", (2, 8192 * 2048), device="cuda").to(E5M2.dtype), torch.tensor(0.5, device="cuda"), torch.bfloat16)
