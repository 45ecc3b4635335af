import pytest
import torch
from numerics import codes, make

from msamp.kernels.reference.cast import cast
from msamp.kernels.reference.cast_transpose import cast_transpose
from msamp.numerics.formats import E4M3, E5M2


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [(33, 17), (16, 16), (1, 5), (0, 16)], ids=str)
def test_both_layouts_hold_the_cast(fmt, shape):
    x, slot, want_slot = make("normal", shape), torch.tensor(0.5), torch.tensor(0.5)
    y, yt = cast_transpose(x, torch.tensor(4.0), slot, fmt.dtype)
    want = cast(x, torch.tensor(4.0), want_slot, fmt.dtype)
    assert (y.shape, yt.shape) == (shape, shape[::-1])
    assert y.is_contiguous()
    assert yt.is_contiguous()
    assert codes(y).equal(codes(want))
    assert codes(yt).equal(codes(want).t())
    assert slot == want_slot
