"""Ways to keep an activation: what comes back, what it takes, and along which axis groups lie."""

import pytest
import torch

from helpers.choices import each_value
from helpers.numerics import SMALL, make
from msamp.nn.saved_activations import ExactGroups, GroupedFP8, Saved
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.metrics import sqnr_db, underflow_frac

every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
WAYS = [Saved(), GroupedFP8(), GroupedFP8(E5M2, 32), GroupedFP8(axis=0), ExactGroups()]


@each_value(dtype=[torch.bfloat16, torch.float16, torch.float32], saved=WAYS)
def test_comes_back_in_its_shape_and_dtype_and_takes_what_it_says(saved, dtype, device):
    x = make("normal", SMALL, device=device).to(dtype)
    parts = saved.keep(x)
    back = saved.restore(parts, dtype)
    assert (back.shape, back.dtype, back.device) == (x.shape, x.dtype, x.device)
    assert sqnr_db(x, back) > (24 if saved != Saved() else 300)
    assert sum(part.nbytes for part in parts) == x.numel() * saved.element_bytes(dtype.itemsize)


def test_as_it_is_nothing_is_copied():
    x = make("normal", SMALL)
    assert Saved().keep(x)[0] is x


def test_groups_lie_along_their_axis():
    """A token of 2^40 times the others' size takes E4M3's range from its neighbours only where it shares their groups."""
    x = make("normal", (64, 64))
    x[5] *= 2.0**40
    along_channels, along_tokens = (saved.restore(saved.keep(x), x.dtype) for saved in (GroupedFP8(), GroupedFP8(axis=0)))
    assert underflow_frac(x, along_channels) < 1e-3
    assert along_tokens[:16].count_nonzero() == 64
    others = torch.arange(64) // 16 != 0
    assert sqnr_db(x[others], along_tokens[others]) > 30
    assert along_tokens.equal(GroupedFP8().restore(GroupedFP8().keep(x.t()), x.dtype).t())


def test_exact_groups_map_their_largest_element_to_448():
    x = make("normal", (8, 32))
    payload, scale_inv = ExactGroups().keep(x)
    assert payload.float().view(8, 2, 16).abs().amax(-1).eq(448).all()
    assert scale_inv.equal(x.view(8, 2, 16).abs().amax(-1) / 448)


def test_another_axis_is_refused():
    with pytest.raises(ValueError, match="axis is 2; choose 1"):
        GroupedFP8(E4M3, 16, 2)
