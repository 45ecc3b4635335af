"""Runs of tensors in one buffer."""

import pytest
import torch
from numerics import bits, make

from msamp.kernels.reference.pack import pack
from msamp.numerics.formats import ALL
from msamp.numerics.quantize import quantize


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_every_run_is_the_cast_of_its_values_and_what_lies_between_stays(fmt):
    xs = [make("normal", (6, 4)), make("log-normal", (5,)).bfloat16()]
    factors = torch.tensor([4.0, 0.37]) if fmt.scaled else None
    out = torch.full((30,), 1.0).to(fmt.dtype)
    pack(None, xs, [(0, 8, 16, 0), (1, 0, 5, 17), (0, 0, 8, 22)], out, factors)
    want = [quantize(x, 1.0 if factors is None else factors[i], fmt).flatten() for i, x in enumerate(xs)]
    one = torch.ones(1).to(fmt.dtype)
    assert bits(out).equal(torch.cat([bits(x) for x in (want[0][8:], one, want[1], want[0][:8])]))
