"""What the fused blocks share."""

import torch
from numerics import make

from msamp.nn.block import ScaleInvs, vector_gradients


def test_each_vector_s_gradient_has_its_dtype_and_what_is_no_vector_has_none(device):
    parts = make("normal", (5, 40), device=device)
    vectors = [torch.zeros(40, device=device, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    found = vector_gradients((parts, vectors[0]), (parts[:0], None), (parts, vectors[1]))
    assert [g if g is None else g.dtype for g in found] == [torch.bfloat16, None, torch.float32]
    torch.testing.assert_close(found[2], parts.sum(0), rtol=1e-6, atol=1e-6)
    assert found[0].equal(found[2].bfloat16())
    assert vector_gradients((parts, None)) == [None]


def test_every_place_for_a_scale_inv_is_zero_aligned_and_given_once(device):
    places, taken = ScaleInvs(2, torch.device(device)), []
    for _ in range(5):
        taken.append(places.take())
        assert (taken[-1].shape, float(taken[-1]), taken[-1].data_ptr() % 16) == ((), 0.0, 0)
        taken[-1].fill_(float(len(taken)))
    assert [float(t) for t in taken] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_place_that_is_kept_for_backward_is_not_changed_by_those_beside_it(device):
    places = ScaleInvs(2, torch.device(device))
    kept = places.take()
    version = kept._version
    places.take().fill_(1.0)
    assert kept._version == version
