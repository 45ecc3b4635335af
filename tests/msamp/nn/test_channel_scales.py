"""Smooth-SwiGLU: the channels' scales between steps, the same product with them, and what they save of channels next to an outlier."""

import copy

import pytest
import torch
from torch import nn

from helpers import dist
from helpers.block_halves import B, H, Half, S, mlp_half, mlp_settings, plain_mlp
from helpers.numerics import make
from msamp.kernels import ops
from msamp.nn.channel_scales import DECAY, HEADROOM, next_scales
from msamp.nn.linear_fn import linear
from msamp.nn.mlp_block import MLPBlock
from msamp.nn.scaling_state import LinearScaling, ScalingState
from msamp.numerics import recipe
from msamp.numerics.formats import E4M3
from msamp.numerics.metrics import saturation_frac, sqnr_db, underflow_frac
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import Delayed
from msamp.numerics.tensor import ScalingTensor

WINDOW = 2
every_level = pytest.mark.parametrize("level", [recipe.O1, recipe.O2, recipe.O3], ids=lambda r: r.name)


def short(level: recipe.Recipe) -> recipe.Recipe:
    return level.with_scaling(Delayed(WINDOW))


def half(level: recipe.Recipe, outlier: float = 1.0, device="cpu", channel: int = 3) -> Half:
    """A SwiGLU half with channel scales in FC2, whose `channel` is `outlier` times larger, and its weight as much smaller."""
    made = mlp_half(short(level), device, "swiglu", bias=False)
    width = made.tensors["fc2"].shape[1]
    made.scaling["fc2"] = LinearScaling(made.recipe.gemm, device=device, channels=width)
    for name, rows, factor in (("fc1", (width + channel, slice(None)), outlier), ("fc2", (slice(None), channel), 1 / outlier)):
        values = made.tensors[name].detach().dequantize(torch.float32)
        values[rows] *= factor
        made.tensors[name] = nn.Parameter(ScalingTensor.quantize(values.bfloat16(), made.recipe.weight))
    return made


def inputs(device="cpu"):
    x, delta, grad = (make("normal", (S, B, H), seed=seed, device=device).bfloat16() for seed in (1, 2, 3))
    return x.requires_grad_(), delta.requires_grad_(), grad


def run(made: Half, x, delta, grad, **changes):
    out = MLPBlock.apply(x, delta, *made.arguments(), mlp_settings(made, "swiglu", True, **changes))
    leaves = [t for t in (x, delta, *made.arguments()) if t is not None]
    return out.detach(), list(torch.autograd.grad(out, leaves, grad))


def trained(made: Half, *given, steps: int = WINDOW) -> ScalingState:
    """Steps without an update, after which the scales are delayed."""
    state = ScalingState(nn.ModuleList(made.scaling.values()))
    for _ in range(steps):
        run(made, *given)
        state.roll()
    return state


def without(made: Half) -> Half:
    """The same layer, in the same state, without channel scales."""
    plain = copy.deepcopy(made)
    plain.scaling["fc2"].channels = None
    return plain


def test_peaks_decay_and_a_step_that_does_not_count_changes_nothing():
    layer = LinearScaling(short(recipe.O2).gemm, channels=3)
    state = ScalingState(layer)
    assert layer.channel_slots(record=False).amax is None
    slots = layer.channel_slots(record=True)
    slots.amax.copy_(torch.tensor([0.25, 100.0, float("inf")]))
    layer.slots(record=True)[0].amax.fill_(100.0)
    state.roll(usable=torch.tensor(False))
    assert layer.channels.peak.tolist() == [0.0, 0.0, 0.0]
    assert layer.channels.amax.tolist() == [0.0, 0.0, 0.0]
    assert slots.scale is None, "a just-in-time scale is measured before the channels' scales"
    for amax in (torch.tensor([0.25, 100.0, float("inf")]), torch.zeros(3)):
        slots.amax.copy_(amax)
        layer.slots(record=True)[0].amax.fill_(100.0)
        state.roll()
    assert layer.channels.peak.tolist() == [0.25 * DECAY, 100 * DECAY, 0.0]
    assert float(layer.scale[0]) == 4.0
    assert layer.channel_slots(record=True).scale.tolist() == [4.0, 1.0, 1.0]
    layer.weight_was_written()
    assert layer.channels.peak.tolist() == [0.0, 0.0, 0.0]


@every_level
def test_the_block_is_the_function_of_torch_next_to_an_outlier(level, device):
    made, given = half(level, 2.0**10, device), inputs(device)
    trained(made, *given)
    scale = made.scaling["fc2"].channels.scale
    assert scale[3] == 1
    assert scale.median() >= 8
    out, grads = run(made, *given)
    plain = made.plain()
    total = (given[0].detach() + given[1].detach()).double().requires_grad_()
    want = plain_mlp(total, plain, "swiglu", True)
    leaves = {"x": total} | {k: v for k, v in plain.items() if v is not None}
    wanted = dict(zip(leaves, torch.autograd.grad(want, list(leaves.values()), given[2].double()), strict=True))
    assert sqnr_db(want, out) > 24.0
    others = [n for n in range(plain["fc2"].shape[1]) if n != 3]
    assert sqnr_db(wanted["fc2"][:, others], grads[-1].float()[:, others]) > 15.0
    assert sqnr_db(wanted["fc2"][:, 3], grads[-1].float()[:, 3]) > 15.0


@every_level
def test_recomputed_and_unfused_it_has_the_same_codes(level, device):
    made, given = half(level, 2.0**10, device), inputs(device)
    trained(made, *given)
    out, grads = run(made, *given)
    again, recomputed = run(made, *given, recompute=True)
    assert out.equal(again)
    assert all(a.equal(b) for a, b in zip(grads, recomputed, strict=True))
    y = make("normal", (40, 2 * made.scaling["fc2"].channels.features), device=device).bfloat16()
    weight, scaling = made.tensors["fc2"], made.scaling["fc2"]
    a = ops.activate(y, "swiglu", None, None, torch.bfloat16)[0].requires_grad_()
    product = linear(a, weight, None, scaling)
    slots = scaling.channel_slots(record=False)
    codes = quantize(a.detach() * slots.scale, scaling.scale[0], E4M3)
    divided = ops.cast_columns(weight.payload, None if level is recipe.O3 else scaling.weight_scales(weight)[0], slots.scale, E4M3.dtype)
    want = ops.scaled_mm(codes, divided, scaling.scale_inv[0], scaling.weight_scales(weight)[1], None, torch.bfloat16, fast_accum=True)
    assert product.equal(want)
    grad_a, grad_w = torch.autograd.grad(product, (a, weight), torch.ones_like(product))
    plain = without(made)
    smooth = linear(a, plain.tensors["fc2"], None, plain.scaling["fc2"])
    own_a, own_w = torch.autograd.grad(smooth, (a, plain.tensors["fc2"]), torch.ones_like(product))
    assert grad_a.equal(own_a), "the gradient of the input does not depend on the channels' scales"
    assert sqnr_db(own_w.float(), grad_w.float()) > 20


# Outlier channel over the others, and least dB that the channel scales gain for the others' values; nothing is lost without an outlier.
@pytest.mark.parametrize(
    ("kind", "outlier", "gain"), [("normal", 1.0, -0.01), ("log-normal", 1.0, -0.01), ("normal", 1e4, 0.5), ("normal", 1e6, 25)]
)
def test_sqnr_underflow_and_saturation_with_and_without(kind, outlier, gain):
    x = make(kind, (256, 64))
    x[:, 5] *= outlier
    scale = Delayed(1).next_scale(x.abs().max().view(1), 448.0)
    by = next_scales(x.abs().amax(0), scale, 448.0)
    others = [n for n in range(64) if n != 5]
    plain, smooth = quantize(x, scale, E4M3), quantize(x * by, scale, E4M3)
    values, smoothed = dequantize(plain, 1 / scale), dequantize(smooth, 1 / scale) / by
    assert sqnr_db(x[:, others], smoothed[:, others]) >= sqnr_db(x[:, others], values[:, others]) + gain
    assert underflow_frac(x, smoothed) <= underflow_frac(x, values)
    assert saturation_frac(smooth, E4M3) <= saturation_frac(plain, E4M3)
    assert all(x[:, n].abs().max() * by[n] * HEADROOM * scale <= E4M3.max for n in range(64) if by[n] > 1), "room to grow"


def _roll_on_two() -> list[float]:
    rank = torch.distributed.get_rank()
    layer = LinearScaling(short(recipe.O2).gemm, channels=2)
    layer.channels.amax.copy_(torch.tensor([1.0 + rank, 2.0]))
    pairs = [torch.distributed.new_group([0]), torch.distributed.new_group([1])]
    state = ScalingState(layer)
    state.roll(torch.distributed.group.WORLD)
    together = layer.channels.peak.tolist()
    layer.channels.amax.copy_(torch.tensor([10.0 + rank, 2.0]))
    state.roll(torch.distributed.group.WORLD, copies=pairs[rank])
    return [*together, *layer.channels.peak.tolist()]


def test_ranks_with_the_same_channels_combine_their_amaxes():
    for rank, got in enumerate(dist.run(_roll_on_two, 2)):
        assert got == [2.0, 2.0, 10.0 + rank, 2.0]
