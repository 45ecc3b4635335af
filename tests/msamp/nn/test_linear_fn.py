"""The autograd function: delayed scales in use, what is kept for backward, what the slots take."""

import copy
import sys

import pytest
import torch
from torch import nn

from helpers.choices import each_value
from helpers.definitions import AmaxHistory
from helpers.numerics import make
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import GRAD_OUTPUT, INPUT, ScalingState
from msamp.numerics import recipe
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import Current, Delayed, inverse
from msamp.numerics.tensor import ScalingTensor

every_level = pytest.mark.parametrize("level", [recipe.O1, recipe.O2, recipe.O3], ids=lambda r: r.name)


def layer(level=recipe.O2, features=(32, 48), dtype=torch.float32, device="cpu") -> FP8Linear:
    torch.manual_seed(0)
    return FP8Linear.from_linear(nn.Linear(*features, bias=False, dtype=dtype).to(device), level)


def swings(steps: int) -> list[float]:
    """Amaxes that rise, fall and jump over six decades."""
    return [10.0**v for v in (torch.rand(steps, generator=torch.Generator().manual_seed(0)) * 6 - 3).tolist()]


@pytest.mark.parametrize("scaling", [Delayed(16), Delayed(3), Current()], ids=str)
def test_forty_steps_use_the_scales_of_the_definition(scaling, device):
    low = layer(recipe.O2.with_scaling(scaling), device=device)
    state = ScalingState(low)
    inputs, grads = AmaxHistory(scaling, E4M3), AmaxHistory(scaling, E5M2)
    w8 = ScalingTensor.quantize(low.weight.detach().dequantize(), E4M3).dequantize()
    for i, size in enumerate(swings(40)):
        x = make("normal", (16, 32), seed=i, device=device) * size
        g = make("normal", (16, 48), seed=100 + i, device=device) / size
        s, t = inputs.step(x.abs().amax()), grads.step(g.abs().amax())
        x8, g8 = dequantize(quantize(x, s, E4M3), inverse(s)), dequantize(quantize(g, t, E5M2), inverse(t))
        x.requires_grad_()
        low.zero_grad()
        y = low(x)
        y.backward(g)
        tolerance = 1e-4 if device.type == "cpu" else 1e-2
        for got, want in ((y, x8 @ w8.t()), (x.grad, g8 @ w8), (low.weight.grad, g8.t() @ x8)):
            assert (got - want).norm() <= tolerance * want.norm(), f"step {i}"
        state.roll()


def saved_tensors(low: FP8Linear, x: torch.Tensor) -> list[torch.Tensor]:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        low(x)
    return kept


@each_value(level=[recipe.O1, recipe.O2, recipe.O3], dtype=[torch.float32, torch.bfloat16])
def test_one_byte_an_input_element_is_kept_for_backward(level, dtype, device):
    low = layer(level, (64, 96), dtype, device)
    x = make("normal", (256, 64), device=device).to(dtype).requires_grad_()
    own = {low.weight.payload.data_ptr()}
    extra = sum(t.nbytes for t in saved_tensors(low, x) if t.data_ptr() not in own)
    assert extra - x.numel() in range(33), f"{extra} bytes for {x.numel()} input elements"


@pytest.mark.gpu
def test_a_step_makes_no_host_sync():
    low = layer(features=(64, 64), dtype=torch.bfloat16, device="cuda")
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    state = ScalingState(low)
    for _ in range(17):  # just in time, then delayed
        torch.cuda.set_sync_debug_mode("default" if low.weight.grad is None else "error")
        try:
            low(x).sum().backward()
            state.roll()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("steps", [0, 16])
def test_what_is_not_finite_shows_in_the_slots(bad, steps):
    low = layer()
    state = ScalingState(low)
    for _ in range(steps):
        low(make("normal", (4, 32))).sum().backward()
        state.roll()
    x, g = make("normal", (4, 32)), make("normal", (4, 48))
    x[1, 2] = g[3, 4] = bad
    low(x).backward(g)
    assert low.scaling.amax.isinf().all()


@each_value(bad=[float("nan"), float("inf"), -float("inf")], steps=[0, 16], where=["input", "grad_output"])
def test_infinities_reach_the_gradients(bad, steps, where, device):
    # A cast saturates, so they would look like large numbers; the optimizer has to see them to skip the step.
    low = layer(device=device)
    state = ScalingState(low)
    for _ in range(steps):
        low(make("normal", (4, 32), device=device)).sum().backward()
        state.roll()
    low.zero_grad()
    x, g = make("normal", (4, 32), device=device), make("normal", (4, 48), device=device)
    (x if where == "input" else g)[1, 2] = bad
    low(x).backward(g)
    assert not low.weight.grad.isfinite().all()
    state.roll()
    low.zero_grad()
    low(make("normal", (4, 32), device=device)).sum().backward()
    assert low.weight.grad.isfinite().all(), "the next step is a good one again"


def calls_of_a_step(layers: int) -> int:
    """How many functions of msamp but the kernels a forward and a backward call."""
    model = nn.Sequential(*(layer(recipe.O1, (16, 16), torch.bfloat16) for _ in range(layers)))
    x, names = make("normal", (4, 16)).bfloat16().requires_grad_(), []

    def seen(frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and "/msamp/n" in file and "/numerics/" not in file:
            names.append(frame.f_code.co_name)

    model(x).sum().backward()
    sys.setprofile(seen)
    try:
        model(x).sum().backward()
    finally:
        sys.setprofile(None)
    return len(names)


def test_a_layer_calls_few_functions():
    # Small layers wait for the host: a call takes 0.1 us or more, the kernels of a layer about 100. It was 56 calls at 7f90861.
    assert calls_of_a_step(5) - calls_of_a_step(2) <= 3 * 50


def test_watches_are_told_what_is_cast_in_training_only():
    low = layer()
    told = []
    low.scaling.watches = {row: lambda *found, row=row: told.append((row, *found)) for row in (INPUT, GRAD_OUTPUT)}
    x, g = make("normal", (2, 8, 32)).requires_grad_(), make("normal", (2, 8, 48), seed=1)
    with torch.no_grad():
        low(x)
    assert not told
    low(x).backward(g)
    assert [row for row, *_ in told] == [INPUT, GRAD_OUTPUT]
    for (_, values, payload, scale_inv), wide, fmt in zip(told, (x, g), (E4M3, E5M2), strict=True):
        assert values.equal(wide.detach().flatten(0, 1))
        assert payload.float().equal(quantize(values, 1 / scale_inv, fmt).float())
    assert not copy.deepcopy(low).scaling.watches


IN_PLACE = {
    "add": lambda y, x: y.add_(x),
    "relu": lambda y, x: torch.relu_(y),
    "mul": lambda y, x: y.mul_(2.0),
}


@pytest.mark.promise("Conversion", "An FP8 layer's output may be modified in place; gradients are those of a copy.")
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("shape", [(16, 32), (2, 8, 32)])
def test_an_output_may_be_changed_in_place_with_the_gradients_of_the_copy(name, shape):
    found = []
    for before in (lambda y: y, torch.clone):
        low = layer(features=(32, 32))
        x = make("normal", shape).requires_grad_()
        y = IN_PLACE[name](before(low(x)), x)
        y.backward(make("normal", shape, seed=2))
        found.append((y.detach(), x.grad, low.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.promise("Conversion", "A weight read by another module multiplies by its dequantized values.")
@every_level
def test_a_weight_that_another_module_reads_multiplies_by_its_values(level):
    # Torchvision's Swin: F.linear(x, self.qkv.weight, self.qkv.bias).
    low, x = layer(level), make("normal", (2, 8, 32)).requires_grad_()
    y = nn.functional.linear(x, low.weight)
    weight = low.weight.dequantize().requires_grad_()
    again = x.detach().requires_grad_()
    want = nn.functional.linear(again, weight)
    g = make("normal", y.shape, seed=3)
    y.backward(g)
    want.backward(g)
    assert all(torch.equal(a, b) for a, b in ((y, want), (x.grad, again.grad), (low.weight.grad, weight.grad)))
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.functional.linear(x, low.weight).dtype == torch.bfloat16
