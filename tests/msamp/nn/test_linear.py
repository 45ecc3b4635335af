"""FP8Linear as a layer: what it computes, what it keeps, and how it behaves in other people's training loops."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.choices import each_once, each_value
from helpers.numerics import KINDS, Measures, check, make, measure, saturation_of_cast, through_a_file
from msamp.nn.expert_layer import Experts
from msamp.nn.linear import FP8Conv1D, FP8Linear, transposed_weights
from msamp.nn.scaling_state import ScalingState
from msamp.numerics import recipe
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.tensor import ScalingTensor

LEVELS = (recipe.O1, recipe.O2, recipe.O3)
every_level = pytest.mark.parametrize("level", LEVELS, ids=lambda r: r.name)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def pair(features=(64, 48), level=recipe.O2, dtype=torch.float32, bias=True, device="cpu", seed=0) -> tuple[nn.Linear, FP8Linear]:
    """The same layer twice: plain, and FP8."""
    torch.manual_seed(seed)
    plain = nn.Linear(*features, bias=bias, dtype=dtype).to(device)
    return plain, FP8Linear.from_linear(copy.deepcopy(plain), level)


def run(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, grad_input, grad_weight) of one forward and backward."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(g.to(y.dtype))
    return y.detach(), x.grad, layer.weight.grad.clone()


@each_value(shape=[(128, 64, 96), (512, 256, 256)], kind=KINDS, dtype=[torch.float32, torch.bfloat16])
def test_the_three_gemms_against_fp32_three_ways(shape, kind, dtype, device):
    tokens, fan_in, fan_out = shape
    plain, low = pair((fan_in, fan_out), dtype=dtype, bias=False, device=device)
    x, g = (make(kind, (tokens, n), seed=s, device=device).to(dtype) for s, n in ((1, fan_in), (2, fan_out)))
    got = run(low, x, g)
    want = run(plain.float(), x.float(), g.float())
    saturation = [saturation_of_cast(t, fmt) for t, fmt in ((x, E4M3), (plain.weight, E4M3), (g, E5M2))]
    operands = {"output": (0, 1), "grad_input": (2, 1), "grad_weight": (2, 0)}
    for (what, (a, b)), approx, exact in zip(operands.items(), got, want, strict=True):
        assert approx.dtype == dtype
        m = measure(exact, approx.float())
        check(what, str(dtype).removeprefix("torch."), kind, shape, Measures(m.sqnr_db, m.underflow, max(saturation[a], saturation[b])))


@every_level
def test_a_layer_from_the_meta_device_and_one_whose_memory_was_lost_begin_like_new_ones(level):
    new, moved, lost = (FP8Linear(64, 48, recipe=level.name, device=device) for device in ("cpu", "meta", "cpu"))
    for layer in (new, moved, lost):
        layer.scaling.add_channels(64)
    assert all(x.equal(y) for x, y in zip(moved.to_empty(device="cpu").buffers(), new.buffers(), strict=True))
    for x in lost.buffers():
        x.fill_(7)
    for layer in (new, moved, lost):
        torch.manual_seed(0)
        layer.reset_parameters()
        assert all(x.equal(y) for x, y in zip(layer.state_dict().values(), new.state_dict().values(), strict=True))


def test_weights_in_bf16_reach_both_bounds():
    """Drawn in BF16, as torch.nn.Linear's are, 0.2 % of them are the lower bound and none the upper."""
    torch.manual_seed(0)
    for weight in (FP8Linear(256, 256, dtype=torch.bfloat16).weight, Experts(1, 256, 256, dtype=torch.bfloat16).fc1_weight):
        assert weight.max() == -weight.min() == 1 / 16


@every_level
def test_it_is_the_product_of_the_quantised_values(level, device):
    _, low = pair(level=level, device=device)
    x, g = make("normal", (40, 64), seed=1, device=device), make("normal", (40, 48), seed=2, device=device)
    y, grad_x, grad_w = run(low, x, g)
    x8 = ScalingTensor.quantize(x, E4M3).dequantize()
    w8 = ScalingTensor.quantize(low.weight.detach().dequantize(), E4M3).dequantize()
    g8 = ScalingTensor.quantize(g, E5M2).dequantize()
    rtol = 1e-4 if device.type == "cpu" else 1e-2
    for got, want in ((y, x8 @ w8.t() + low.bias), (grad_x, g8 @ w8), (grad_w, g8.t() @ x8), (low.bias.grad, g.sum(0))):
        assert (got - want).norm() / want.norm() < rtol


@every_level
def test_the_weight_is_stored_as_the_level_says(level):
    plain, low = pair(level=level, dtype=torch.bfloat16)
    assert isinstance(low.weight, ScalingTensor)
    assert isinstance(low.weight, nn.Parameter)
    assert low.weight.format is {"O1": FP16, "O2": FP16, "O3": E4M3}[level.name]
    assert (low.weight.dtype, low.weight.shape) == (plain.weight.dtype, plain.weight.shape)
    assert low.bias.equal(plain.bias)


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (2, 1, 3, 64)], ids=str)
@every_dtype
def test_any_leading_dimensions(shape, dtype):
    plain, low = pair(dtype=dtype)
    x = make("normal", shape, seed=1).to(dtype).requires_grad_()
    y = low(x)
    assert (y.shape, y.dtype) == ((*shape[:-1], 48), dtype)
    y.sum().backward()
    assert (x.grad.shape, x.grad.dtype) == (x.shape, dtype)
    assert sqnr_db(plain(x), y) > 25


@each_value(shape=[(0, 64), (0, 5, 64), (3, 0, 64)], dtype=[torch.float32, torch.bfloat16])
def test_an_empty_batch(shape, dtype, device):
    _, low = pair(dtype=dtype, device=device)
    x = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
    y = low(x)
    assert y.shape == (*shape[:-1], 48)
    y.sum().backward()
    assert x.grad.shape == shape
    assert low.weight.grad.eq(0).all()
    assert low.bias.grad.eq(0).all()


# ------------------------------------------------------------------------------------------------- in a training loop


def test_frozen_weight_and_input_without_gradient():
    plain, low = pair()
    x = make("normal", (8, 64), seed=1)
    low.weight.requires_grad_(False)
    inner = x.clone().requires_grad_()
    low(inner).sum().backward()
    assert low.weight.grad is None
    assert low.bias.grad is not None
    reference = x.clone().requires_grad_()
    plain(reference).sum().backward()
    assert sqnr_db(reference.grad, inner.grad) > 22
    low.weight.requires_grad_(True)
    low(x).sum().backward()
    assert low.weight.grad is not None
    for p in low.parameters():
        p.requires_grad_(False)
    assert not low(x).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_takes_the_input_in_its_dtype(device, dtype):
    _, low = pair(device=device)
    x = make("normal", (8, 64), seed=1, device=device).requires_grad_()
    with torch.autocast(device.type, dtype):
        y = low(x)
        z = low(nn.functional.relu(x))
    assert y.dtype == z.dtype == dtype
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    assert low.weight.grad.dtype == torch.float32
    assert y.equal(low(x.to(dtype)))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("steps", [0, 16])
def test_gradient_checkpointing_changes_nothing(reentrant, steps):
    torch.manual_seed(0)
    base = nn.Sequential(FP8Linear(32, 48), nn.GELU(), FP8Linear(48, 32))
    x = make("normal", (24, 32), seed=1)
    state = ScalingState(base)
    for i in range(steps):
        base(x * (1 + i)).sum().backward()
        state.roll()
    base.zero_grad()
    other = copy.deepcopy(base)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = base(a), checkpoint(other, b, use_reentrant=reentrant)
    (y.square().sum() + z.square().sum()).backward()
    assert y.equal(z)
    assert all(p.grad.equal(q.grad) for p, q in zip((a, *base.parameters()), (b, *other.parameters()), strict=True))
    assert all(p.equal(q) for p, q in zip(base.buffers(), other.buffers(), strict=True))


def test_an_evaluation_leaves_the_histories_untouched():
    low = pair()[1]
    low(make("normal", (8, 64)))
    before = {k: v.clone() for k, v in low.scaling.named_buffers()}
    assert before["amax"][0] > 0
    low.eval()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            low(make("normal", (8, 64), seed=1) * 1e6)
    assert all(v.equal(before[k]) for k, v in low.scaling.named_buffers())


CHANGES = {
    "copy_": lambda low, w: low.weight.copy_(w),
    "copy_ through data": lambda low, w: low.weight.data.copy_(w),
    "copy_ through detach": lambda low, w: low.weight.detach().copy_(w),
    "store_": lambda low, w: low.weight.store_(w),
    "load_state_dict": lambda low, w: low.load_state_dict({**low.state_dict(), "weight": w}),
    "load_state_dict assign": lambda low, w: low.load_state_dict(
        {**low.state_dict(), "weight": ScalingTensor.quantize(w, low.weight.format)}, assign=True
    ),
    "mul_": lambda low, w: low.weight.mul_(1000.0),
    "zero_": lambda low, w: low.weight.zero_(),
}


@each_value(name=CHANGES, level=LEVELS)
def test_a_weight_changed_in_place_refreshes_its_scale(name, level):
    _, low = pair(level=level, bias=False)
    x = make("normal", (8, 64), seed=1)
    low(x)
    for _ in range(2):
        with torch.no_grad():
            CHANGES[name](low, low.weight.detach().dequantize() * 300.0)
        want = x @ low.weight.detach().dequantize().t()
        assert low(x).equal(want) if name == "zero_" else sqnr_db(want, low(x)) > 25


@every_level
def test_saved_and_loaded_layers_go_on_alike(level):
    low = pair(level=level)[1]
    state = ScalingState(low)
    for i in range(20):
        low(make("normal", (8, 64), seed=i) * (1 + i % 3)).square().sum().backward()
        state.roll()
    low(make("normal", (8, 64), seed=99))
    other = pair(level=level, seed=1)[1]
    other.load_state_dict(through_a_file(low.state_dict(), weights_only=True))
    assert other.scaling.delayed
    assert all(a.equal(b) for a, b in zip(low.buffers(), other.buffers(), strict=True))
    x, g = make("normal", (8, 64), seed=50) * 7, make("normal", (8, 48), seed=51)
    assert all(a.equal(b) for a, b in zip(run(low, x, g), run(other, x, g), strict=True))


@each_once(1, level=LEVELS, steps=[16, 0])
def test_compiled_it_computes_the_same(level, steps):
    low = pair(level=level)[1]
    x, g = make("normal", (16, 64), seed=1), make("normal", (16, 48), seed=2)
    state = ScalingState(low)
    for _ in range(steps):
        run(low, x, g)
        state.roll()
    low.zero_grad()
    other = copy.deepcopy(low)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    inner = x.clone().requires_grad_()
    y = compiled(inner)
    y.backward(g)
    want = run(low, x, g)
    assert all(a.equal(b) for a, b in zip((y, inner.grad, other.weight.grad), want, strict=True))
    assert other.scaling.amax.equal(low.scaling.amax)


def test_a_conv1d_keeps_its_weight_the_other_way_round_in_states():
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.randn(48))

    source = Conv1D()
    layer = FP8Conv1D.from_linear(source, "O2")
    assert (layer.in_features, layer.out_features) == (32, 48)
    x = torch.randn(4, 32)
    assert sqnr_db(torch.addmm(source.bias, x, source.weight), layer(x)) > 20
    state = layer.state_dict()
    assert torch.allclose(state["weight"].dequantize(), source.weight, rtol=1e-3, atol=1e-6)
    other = FP8Conv1D.from_linear(Conv1D(), recipe.O2)
    other.load_state_dict(state)
    assert torch.equal(other.weight.detach(), layer.weight.detach())
    assert transposed_weights(nn.ModuleDict({"a": layer, "b": FP8Linear(32, 32)})) == {"a.weight"}
