"""The scale of an amax as an operator: the definition's numbers, with either kind of scale where there is no amax."""

import pytest
import torch
from numerics import random_floats

from msamp.kernels.reference.scale_from_amax import scale_from_amax
from msamp.numerics import scaling


@pytest.mark.parametrize("given", [True, False])
def test_it_is_the_definition(given):
    amax = random_floats(1000, seed=4)
    last = torch.rand(1000) if given else None
    want = scaling.scale_from_amax(amax, 448.0, last if given else 0.5)
    assert scale_from_amax(amax, 448.0, last, 0.5).equal(want)
