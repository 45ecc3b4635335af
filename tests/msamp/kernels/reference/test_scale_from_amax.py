"""The scale of an amax as an operator: the definition's numbers, with either kind of scale where there is no amax."""

import pytest
import torch

from helpers.numerics import random_floats
from msamp.kernels.reference.scale_from_amax import scale_from_amax, scale_from_maxima
from msamp.numerics import scaling
from msamp.numerics.granularity import TENSORWISE, Group
from msamp.numerics.range_expand import two_stage_amax


@pytest.mark.parametrize("given", [True, False])
def test_it_is_the_definition(given):
    amax = random_floats(1000, seed=4)
    last = torch.rand(1000) if given else None
    want = scaling.scale_from_amax(amax, 448.0, last if given else 0.5)
    assert scale_from_amax(amax, 448.0, last, 0.5).equal(want)


@pytest.mark.parametrize("bad", [1.0, 0.0, float("nan"), -float("inf")])
def test_the_scale_of_the_maxima_is_that_of_the_tensor(bad):
    x = random_floats(1000, seed=6).masked_fill(torch.arange(1000) % 9 > 0, 0.0).nan_to_num(0.0, 0.0, 0.0)
    x[17] = bad
    scale = scale_from_maxima(two_stage_amax(x, Group(64))[0], 448.0)
    assert scale.shape == ()
    assert scale.equal(scale_from_amax(TENSORWISE.amax(x), 448.0, None, 1.0))
