"""The Triton sums against their twin: counts and amax exactly, FP64 sums to their own rounding."""

import importlib
import math

import pytest
import torch

from helpers.choices import every_value
from helpers.numerics import make
from msamp.kernels.reference import tally as twin
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32
from msamp.numerics.quantize import cast

FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "fp16": FP16, "bf16": BF16, "fp32": FP32}
SHAPES = [(3, 5, 7), (1,), (20, 129)]
LONG = (33, 2048)  # needs two programs


def kernel(name, row, *args):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    getattr(importlib.import_module("msamp.kernels.triton.tally"), name)(row, *args)
    return row


def agree(got: torch.Tensor, want: torch.Tensor, exact: tuple[int, ...]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0, equal_nan=True)
    assert got[list(exact)].equal(want[list(exact)])


@every_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_tally_is_its_twins(name, dtype, triton_device):
    fmt, scale_inv = FORMATS[name], torch.tensor(2.0**-3, device=triton_device)
    for i, shape in enumerate(SHAPES):
        x = make("log-normal", shape, i, device=triton_device)
        x.view(-1)[::9] = 0
        x.view(-1)[::7] *= 2.0**-30
        x.view(-1)[::11] *= 1e4
        x = x.to(dtype).clamp(-6e4, 6e4)
        payload = cast((x.float() * 8.0), fmt)
        start = torch.tensor([3.0, 2, 1, 1, 0.5, 0.25, 7e4, 1], dtype=torch.float64, device=triton_device)
        for row, values in ((start, x), (torch.zeros_like(start), x * 1e-3)):  # of which the payload is nothing but noise
            want = row.clone()
            twin.tally_(want, values, payload, scale_inv)
            agree(kernel("tally_", row.clone(), values, payload, scale_inv), want, (0, 1, 2, 3, 6, 7))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(bad, triton_device):
    x = make("normal", (30, 11), device=triton_device)
    x[17, 3] = bad
    want = torch.zeros(8, dtype=torch.float64, device=triton_device)
    one = torch.ones((), device=triton_device)
    twin.tally_(want, x, cast(x, E5M2), one)
    got = kernel("tally_", torch.zeros_like(want), x, cast(x, E5M2), one)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0, equal_nan=True)
    again = kernel("tally_", got.clone(), make("normal", (5,), device=triton_device), make("normal", (5,), device=triton_device), one)
    assert again[6].isnan() if math.isnan(bad) else again[6] == math.inf


def test_the_sums_of_several_programs_are_added_up(triton_device):
    x, scale_inv = make("normal", LONG, device=triton_device), torch.tensor(0.25, device=triton_device)
    payload, zeros = cast(x * 4.0, E4M3), torch.zeros(8, dtype=torch.float64, device=triton_device)
    want, want_update = zeros.clone(), zeros[:7].clone()
    twin.tally_(want, x, payload, scale_inv)
    agree(kernel("tally_", zeros.clone(), x, payload, scale_inv), want, (0, 1, 2, 3, 6, 7))
    twin.tally_update_(want_update, x * 0.99, x, payload, scale_inv)
    torch.testing.assert_close(kernel("tally_update_", zeros[:7].clone(), x * 0.99, x, payload, scale_inv), want_update, rtol=1e-10, atol=0)


def test_nothing_adds_nothing(triton_device):
    row = torch.arange(8, dtype=torch.float64, device=triton_device)
    empty, one = torch.zeros(0, 4, device=triton_device), torch.ones((), device=triton_device)
    assert kernel("tally_", row.clone(), empty, empty.to(E4M3.dtype), one).equal(row)
    assert kernel("tally_update_", row.clone(), empty, empty, empty, one).equal(row)


@pytest.mark.parametrize("name", FORMATS)
def test_an_update_s_sums_are_its_twins(name, triton_device):
    scale_inv = torch.tensor(2.0**-2, device=triton_device)
    for i, shape in enumerate(SHAPES):
        before = make("normal", shape, i, device=triton_device)
        wanted = before + make("normal", shape, i + 9, device=triton_device) * 1e-3
        wanted.view(-1)[::5] = before.view(-1)[::5]
        stored = cast(wanted * 4.0, FORMATS[name])
        start = torch.tensor([3.0, 2, 1, -1, 5, 0.5, -0.5], dtype=torch.float64, device=triton_device)
        want = start.clone()
        twin.tally_update_(want, before, wanted, stored, scale_inv)
        got = kernel("tally_update_", start.clone(), before, wanted, stored, scale_inv)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        assert got[[0, 4]].equal(want[[0, 4]])


@every_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3.dtype], ids=str)
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "fp16"])
def test_counts_are_their_twins(name, dtype, triton_device):
    """Of several programs too; counts of a column of a larger table."""
    fmt, table = FORMATS[name], torch.ones(3, 6, dtype=torch.int64, device=triton_device).T
    for i, shape in enumerate([*SHAPES, LONG, (0, 4)]):
        x = make("log-normal", shape, i, device=triton_device)
        x.view(-1)[::9] = 0
        x.view(-1)[::7] *= 2.0**-30
        x.view(-1)[::11] *= 1e6
        x.view(-1)[::101] = math.nan
        payload = cast(x * 8.0, fmt)
        x = cast(x.clamp(-400, 400), E4M3) if dtype is E4M3.dtype else x.to(dtype)
        want, before = table[:3, 1].clone(), table.clone()
        twin.count_(want, x, payload)
        kernel("count_", table[:3, 1], x, payload)
        assert table[:3, 1].equal(want)
        before[:3, 1] = want
        assert table.equal(before)
