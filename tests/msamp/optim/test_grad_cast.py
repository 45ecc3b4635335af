"""Plain gradients into the optimizer's formats, many at a time: the bits of one at a time."""

import torch

from helpers.choices import each_value
from helpers.numerics import KINDS, bits, make
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.grad_cast import GradCast

SHAPES = ((24, 40), (7,), (), (3, 5), (0,), (128, 64))


def gradients(kind: str, device: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [(make(kind if shape else "normal", shape, seed=i) * 2.0 ** (4 * i)).to(device, dtype) for i, shape in enumerate(SHAPES)]


@each_value(fmt=[E4M3, E5M2, FP16], kind=KINDS)
def test_each_gradient_has_the_bits_of_its_own_quantisation(kind, fmt, device):
    gs = [*gradients(kind, device), *gradients(kind, device, torch.float32)]
    cast = GradCast()
    for _ in range(2):  # again, with what is remembered
        for g, found in zip(gs, cast(gs, fmt), strict=True):
            alone = ScalingTensor.quantize(g, fmt)
            assert isinstance(found, ScalingTensor)
            assert (found.dtype, found.format, found.shape) == (g.dtype, fmt, g.shape)
            assert bits(found.payload).equal(bits(alone.payload))
            assert found.scale_inv.equal(alone.scale_inv)


def test_one_that_is_not_finite_is_marked_and_leaves_the_others_alone(device):
    gs = gradients("normal", device)
    gs[0][3, 5], gs[3][0, 0] = float("nan"), float("-inf")
    found = GradCast()(gs, E4M3)
    assert [bool(g.scale_inv.isnan()) for g in found] == [True, False, False, True, False, False]
    assert bits(found[5].payload).equal(bits(ScalingTensor.quantize(gs[5], E4M3).payload))


def test_rows_take_the_scale_of_the_whole_tensor(device):
    whole = make("channel-outlier", (64, 32), device=device)
    halves = [whole[:32], whole[32:] * 0.01]
    amax = TENSORWISE.amax(whole).expand(2).contiguous()
    found = GradCast()(halves, E4M3, amax)
    assert found[0].scale_inv.equal(found[1].scale_inv)
    assert bits(found[0].payload).equal(bits(ScalingTensor.quantize(whole, E4M3).payload[:32]))
