"""What the fused blocks share."""

import torch

from helpers.numerics import make
from msamp.nn.block import vector_gradients


def test_each_vector_s_gradient_has_its_dtype_and_what_is_no_vector_has_none(device):
    parts = make("normal", (5, 40), device=device)
    vectors = [torch.zeros(40, device=device, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    found = vector_gradients((parts, vectors[0]), (parts[:0], None), (parts, vectors[1]))
    assert [g if g is None else g.dtype for g in found] == [torch.bfloat16, None, torch.float32]
    torch.testing.assert_close(found[2], parts.sum(0), rtol=1e-6, atol=1e-6)
    assert found[0].equal(found[2].bfloat16())
    assert vector_gradients((parts, None)) == [None]
