"""The Triton join of weights against its twin: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.choices import each_once
from helpers.numerics import codes, make
from msamp.kernels.reference.join_weights import join_weights as twin
from msamp.numerics.formats import E4M3, FP16
from msamp.numerics.quantize import quantize


def kernel(*args, **flags):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.join_weights").join_weights(*args, **flags)


def parts(shapes, fmt, device, scales=(2.0, 64.0, 0.5)):
    """Stored weights of different scales, the multipliers to FP8, and the scale_invs of the FP8 weights."""
    xs, multipliers, scale_invs = [], [], []
    for i, (shape, scale) in enumerate(zip(shapes, scales, strict=False)):
        x = make("normal", shape, seed=i, device=device) / scale
        xs.append(quantize(x, torch.tensor(scale * (16.0 if fmt is E4M3 else 1.0), device=device), fmt))
        multipliers.append(torch.tensor(16.0 if fmt is FP16 else float("nan"), device=device))
        scale_invs.append(torch.tensor(1 / (16.0 * scale), device=device))
    return xs, multipliers, scale_invs


@each_once(shapes=[[(64, 33)], [(128, 64), (16, 64)], [(132, 70), (4, 70), (260, 70)]], fmt=[E4M3, FP16], transpose=[False, True])
def test_codes_and_scale_are_the_twins(shapes, fmt, transpose, triton_device):
    given = parts(shapes, fmt, triton_device)
    got, want = (join(*given, E4M3.dtype, transpose=transpose) for join in (kernel, twin))
    assert codes(got[0]).equal(codes(want[0]))
    assert got[0].shape == want[0].shape
    assert got[0].is_contiguous()
    assert got[1].equal(want[1])


@pytest.mark.parametrize("transpose", [False, True])
def test_one_scale_is_the_smallest(transpose):
    xs, multipliers, scale_invs = parts([(16, 8), (16, 8)], E4M3, "cpu")
    joined, scale_inv = twin(xs, multipliers, scale_invs, E4M3.dtype, transpose=transpose)
    want = torch.cat([x.float() * s for x, s in zip(xs, scale_invs, strict=True)])
    assert scale_inv == max(scale_invs)
    got = joined.float() * scale_inv
    torch.testing.assert_close(got.t() if transpose else got, want, rtol=2**-4, atol=float(scale_inv) * 2**-10)


def test_a_scale_that_is_nan_reaches_all(triton_device):
    xs, multipliers, scale_invs = parts([(4, 8), (4, 8)], E4M3, triton_device)
    scale_invs[1] = torch.full_like(scale_invs[1], float("nan"))
    got, want = (join(xs, multipliers, scale_invs, E4M3.dtype) for join in (kernel, twin))
    assert all(x.float().isnan().all() for x in (*got, *want))


def test_other_shapes_are_refused(triton_device):
    with pytest.raises(ValueError, match="there are 6 rows"):
        kernel(*parts([(6, 8)], E4M3, triton_device), E4M3.dtype)
