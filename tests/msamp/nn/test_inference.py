"""FP8 linear layers in inference: rows by themselves, weights without a copy."""

import pytest
import torch

from helpers.choices import each_value
from msamp.nn.inference import InferenceGemm, row_casts
from msamp.numerics.formats import E4M3, FP16
from msamp.numerics.granularity import Block
from msamp.numerics.recipe import GEMMS
from msamp.numerics.tensor import ScalingTensor


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@each_value(recipe=GEMMS, stored=[E4M3, FP16])
def test_a_row_gives_what_it_gives_alone(recipe: str, stored):
    gemm = InferenceGemm(ScalingTensor.quantize(rows(1, 48, 160), stored), GEMMS[recipe])
    x = rows(2, 7, 160).bfloat16()
    x[3] *= 3e4  # one scale for the tensor would leave nothing of the others
    together = gemm(x)
    assert together.dtype == torch.bfloat16
    for i in range(7):
        # The order of a sum may be another one for another number of rows: a rounding of BF16.
        torch.testing.assert_close(gemm(x[i : i + 1])[0], together[i], rtol=2**-7, atol=1e-3 * float(together[i].abs().max()))


@pytest.mark.parametrize("stored", [E4M3, FP16], ids=str)
def test_the_product_is_that_of_the_values(stored):
    weight = ScalingTensor.quantize(rows(1, 48, 160), stored)
    x, bias = rows(2, 2, 3, 160), rows(3, 48)
    y = InferenceGemm(weight, GEMMS["delayed"])(x, bias)
    exact = x @ weight.dequantize(torch.float32).t() + bias
    assert y.shape == (2, 3, 48)
    assert y.dtype == torch.float32
    # Either operand is off by at most 2^-4 of itself, and errors add up as a random walk does.
    assert float((y - exact).norm() / exact.norm()) < 0.05


def test_recipes_whose_scales_stay_in_a_row_keep_their_casts():
    for name in ("blockwise", "blockwise-power-of-two", "mxfp8"):
        assert row_casts(GEMMS[name]) == (GEMMS[name].input, GEMMS[name].weight)
    for name in ("delayed", "tensorwise"):
        assert row_casts(GEMMS[name])[0].granularity == Block(1, 128)
        assert not row_casts(GEMMS[name])[0].scaling.window


@pytest.mark.gpu
def test_on_a_gpu_as_on_a_cpu():
    weight, x = ScalingTensor.quantize(rows(1, 256, 384), E4M3), rows(2, 5, 384).bfloat16()
    here = InferenceGemm(weight, GEMMS["delayed"])(x)
    there = InferenceGemm(ScalingTensor(weight.payload.cuda(), weight.scale_inv.cuda()), GEMMS["delayed"])(x.cuda())
    torch.testing.assert_close(there.cpu(), here, rtol=2**-6, atol=0.02 * float(here.abs().max()))
