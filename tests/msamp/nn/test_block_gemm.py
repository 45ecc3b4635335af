"""One linear layer of a block: its three GEMMs are those of the layer by itself."""

import pytest
import torch
from numerics import make
from torch import nn

from msamp.kernels import ops
from msamp.nn.block_gemm import BlockGemm, ScaleInvs, grad_weight, vector_gradients
from msamp.nn.linear import FP8Linear
from msamp.numerics import recipe


@pytest.mark.parametrize("level", [recipe.O2, recipe.O3], ids=lambda r: r.name)
def test_the_gemms_are_those_of_the_layer(level, device):
    torch.manual_seed(0)
    layer = FP8Linear.from_linear(nn.Linear(64, 48, dtype=torch.bfloat16).to(device), level)
    x = make("normal", (32, 64), device=device).to(torch.bfloat16).requires_grad_()
    g = make("normal", (32, 48), seed=1, device=device).to(torch.bfloat16)
    y = layer(x)
    y.backward(g)
    gemm, payload = BlockGemm.of(layer.scaling, layer.weight), layer.weight.payload
    x8, x8_t, x_scale_inv, _ = ops.cast_transpose(x.detach(), None, None, gemm.x_dtype, row=True, col=True)
    g8, g8_t, g_scale_inv, sums = ops.cast_transpose(g, None, None, gemm.grad_dtype, row=True, col=True, colsum=True)
    assert gemm.output(x8, x_scale_inv, payload, layer.bias, x.dtype).equal(y)
    assert gemm.grad_input(g8, g_scale_inv, payload, x.dtype).equal(x.grad)
    assert grad_weight(g8_t, g_scale_inv, x8_t, x_scale_inv, torch.bfloat16).equal(layer.weight.grad)
    assert vector_gradients((sums, layer.bias))[0].equal(layer.bias.grad)


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
