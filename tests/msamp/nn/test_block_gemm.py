"""One linear layer of a block: its three GEMMs are those of the layer by itself."""

import pytest
import torch
from numerics import make
from torch import nn

from msamp.kernels import ops
from msamp.nn.block_gemm import BlockGemm, bias_gradient, grad_weight
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
    x8, x8_t, x_scale_inv, _ = ops.cast_transpose(x.detach(), None, None, gemm.x_dtype, True, True, False)
    g8, g8_t, g_scale_inv, sums = ops.cast_transpose(g, None, None, gemm.grad_dtype, True, True, True)
    assert gemm.output(x8, x_scale_inv, payload, layer.bias, x.dtype).equal(y)
    assert gemm.grad_input(g8, g_scale_inv, payload, x.dtype).equal(x.grad)
    assert grad_weight(g8_t, g_scale_inv, x8_t, x_scale_inv, torch.bfloat16).equal(layer.weight.grad)
    assert bias_gradient(sums, layer.bias).equal(layer.bias.grad)
    assert bias_gradient(sums, None) is None
