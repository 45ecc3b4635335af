"""The Triton sum of parts against its twin: under the interpreter here, compiled on a GPU; the sum's order differs."""

import importlib

import pytest
import torch

from helpers.choices import every_value
from helpers.numerics import bits, make
from msamp.kernels.reference.sums import sum_parts as twin


def kernel(*args):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.sums").sum_parts(*args)


def assert_same(shapes, device, dtype=torch.bfloat16) -> None:
    parts = [make("normal", shape, seed=i, device=device) for i, shape in enumerate(shapes)]
    got, again = kernel(parts, dtype), kernel(parts, dtype)
    for x, a, b, want in zip(parts, got, again, twin(parts, dtype), strict=True):
        assert (a.dtype, a.shape, a.device) == (want.dtype, want.shape, want.device)
        torch.testing.assert_close(a, want, rtol=torch.finfo(a.dtype).eps, atol=1e-5 * float(x.abs().sum(0).max()))
        assert bits(a).equal(bits(b)), "the same result every time"


@every_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shapes", [[(1, 1)], [(70, 33), (3, 100)], [(64, 32), (1, 5), (130, 31), (2, 64)]], ids=str)
def test_several_tensors_in_one_launch(shapes, dtype, triton_device):
    assert_same(shapes, triton_device, dtype)


def test_one_part_is_rounded_to_nearest_even(triton_device):
    x = make("log-normal", (1, 100), device=triton_device)
    assert bits(kernel([x], torch.bfloat16)[0]).equal(bits(x[0].bfloat16()))


def test_what_is_not_finite_stays(triton_device):
    x = make("normal", (5, 40), device=triton_device)
    x[3, 2], x[4, 7] = float("nan"), float("inf")
    got = kernel([x], torch.bfloat16)[0]
    assert got.isnan().nonzero().tolist() == [[2]]
    assert got.isinf().nonzero().tolist() == [[7]]


@pytest.mark.gpu
def test_a_layer_s_sums_on_the_gpu():
    assert_same([(264, 2048), (264, 2048), (256, 8192), (64, 2048)], "cuda")
    assert_same([(264, 4097), (256, 6144)], "cuda", torch.float32)
