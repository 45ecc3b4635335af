"""The guard's decisions: bounds, counts of checks, states, and what it measures against the definitions."""

import math
import pickle

import pytest
import torch
from torch import nn

from helpers.numerics import make
from msamp.nn.linear import FP8Linear
from msamp.nn.precision_guard import SUMS, Bounds, LayerGuard, LayerState, check_state, linear_layers
from msamp.numerics import recipe
from msamp.numerics.accumulation import accumulating
from msamp.numerics.metrics import sqnr_db, underflow_frac
from msamp.numerics.quantize import dequantize
from msamp.numerics.scaling import Current, Delayed

GOOD, UNDERFLOW = [100.0, 100.0, 0.0, 0.0, 1e4, 1.0], [100.0, 80.0, 60.0, 0.0, 1e4, 1.0]
SATURATED, NOISY = [100.0, 100.0, 0.0, 1.0, 1e4, 1.0], [100.0, 100.0, 0.0, 0.0, 1e4, 1e3]
NOTHING = [0.0] * SUMS


def model(level: recipe.Recipe = recipe.O2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [FP8Linear.from_linear(nn.Linear(32, 32, bias=False), level.with_scaling(Delayed(2)), name=f"fc{n}") for n in range(2)]
    return nn.Sequential(*layers)


def guard(made: nn.Module, **options) -> LayerGuard:
    return LayerGuard(dict(linear_layers(made.named_modules())), **options)


def judged(one: LayerGuard, *checks, name="0", first=1):
    """The changes after each of several checks of a layer, whose input has these sums."""
    return [one._judge(step, name, [tally, NOTHING, NOTHING], [[0.0] * 3] * 3) for step, tally in enumerate(checks, first)]


@pytest.mark.parametrize(("tally", "text"), [
    (GOOD, None),
    (UNDERFLOW, "input underflow 0.75, above 0.5"),
    (SATURATED, "input saturation 0.01, above 0.001"),
    (NOISY, "input SQNR 10.0 dB, below 15"),
    ([100.0, 100.0, 0.0, 0.0, 1e4, 0.0], None),
])  # fmt: skip
def test_bounds(tally, text):
    found = Bounds().broken_by("input", tally)
    assert (None if found is None else str(found)) == text


def test_a_layer_is_raised_after_bad_checks_in_a_row_and_returns_after_good_ones():
    made = model()
    one = guard(made, raise_after=2, return_after=3)
    assert judged(one, UNDERFLOW, GOOD, UNDERFLOW) == [None] * 3
    assert not made[0].scaling.raised
    (change,) = judged(one, SATURATED, first=4)
    assert (change.layer, change.raised, change.steps) == ("0", True, 0)
    assert str(change) == "0 computes in BF16 from now on: input saturation 0.01, above 0.001"
    assert made[0].scaling.raised
    assert not made[1].scaling.raised
    assert one.raised == {"0": LayerState(True, 4, 0, "input saturation 0.01, above 0.001")}
    assert judged(one, GOOD, GOOD, UNDERFLOW, GOOD, GOOD, first=5) == [None] * 5
    (change,) = judged(one, GOOD, first=10)
    assert str(change) == "0 returns to FP8 after 6 steps in BF16 (input saturation 0.01, above 0.001)"
    assert not made[0].scaling.raised
    assert one.states["0"] == LayerState()


@pytest.mark.parametrize("level", [recipe.O2, recipe.O3], ids=lambda r: r.name)
def test_what_it_measures_are_the_definitions(level):
    made = model(level)
    one = guard(made, every=1)
    layer, seen = made[0], {}
    for row in (0, 1):
        layer.scaling.watches[row] = lambda *found, row=row: seen.__setitem__(row, found)
    one.arm()
    x = make("log-normal", (16, 32), seed=1)
    made(x).square().sum().backward()
    one.check(1)
    for row, tally in enumerate(one._table[0, :2].tolist()):
        values, payload, scale_inv = seen[row]
        approx = dequantize(payload, scale_inv)
        assert tally[0] == 512
        assert tally[2] / tally[1] == pytest.approx(underflow_frac(values, approx))
        assert 10 * math.log10(tally[4] / tally[5]) == pytest.approx(sqnr_db(values.float(), approx), abs=1e-3)
    assert bool(one._table[0, 2, 0]) == (level is recipe.O2), "at O3 the weight is not cast"
    assert not one.armed
    assert not layer.scaling.checks


def test_states_travel_by_name_and_are_checked():
    made, other = model(), model()
    one = guard(made, raise_after=1)
    judged(one, UNDERFLOW, GOOD)
    state = pickle.loads(pickle.dumps(one.state_dict()))
    assert state == {"layers": {"0": {"raised": True, "since": 1, "count": 1, "why": "input underflow 0.75, above 0.5"}}}
    second = guard(other, raise_after=1)
    judged(second, UNDERFLOW, name="1")
    second.load_state_dict(state)
    assert [layer.scaling.raised for layer in other] == [True, False]
    assert second.states == one.states
    with pytest.raises(ValueError, match="the guard's state has 7, which is not an FP8 linear layer of this model"):
        second.load_state_dict({"layers": {"7": state["layers"]["0"]}})
    assert second.states == one.states
    for wrong in (None, {}, {"layers": {"0": {"raised": 1}}}, {"layers": {"0": state["layers"]["0"] | {"since": -1}}}, {"layers": [3]}):
        with pytest.raises(ValueError, match="the guard's state is"):
            check_state(wrong)
    second.release()
    assert not any(layer.scaling.raised for layer in other)


@pytest.mark.parametrize(("products", "shrinks"), [("output", True), ("none", False)])
def test_a_layer_whose_sums_shrink_is_raised_and_stays(products, shrinks):
    torch.manual_seed(0)
    level = recipe.O2.with_gemm(recipe.O2.gemm.with_fast(products)).with_scaling(Current())
    made = nn.Sequential(FP8Linear.from_linear(nn.Linear(4096, 16), level, name="fc"))
    with torch.no_grad():
        made[0].weight.copy_(torch.rand(16, 4096))
    one, changes = guard(made, raise_after=1, return_after=1), []
    for step in (1, 2):
        one.arm()
        with accumulating("hopper"):
            made(torch.rand(16, 4096, requires_grad=True)).sum().backward()
        changes += one.check(step)
    assert [str(change) for change in changes if not shrinks] == []
    assert [change.raised for change in changes] == [True] * shrinks
    assert all("sums of output" in change.why for change in changes)
    assert made[0].scaling.raised == shrinks


@pytest.mark.parametrize(("options", "message"), [
    ({"every": 0}, "every is 0; it must be an integer of at least 1"),
    ({"raise_after": 1.5}, "raise_after is 1.5; it must be"),
    ({"return_after": -1}, "return_after is -1; it must be"),
])  # fmt: skip
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        guard(model(), **options)


def test_a_model_without_fp8_layers_and_a_second_guard_are_refused():
    with pytest.raises(ValueError, match="no FP8 linear layer that could be guarded"):
        guard(nn.Sequential(nn.Linear(4, 4)))
    made = model()
    first = guard(made, raise_after=1)
    judged(first, UNDERFLOW)
    with pytest.raises(ValueError, match="0 is under another guard"):
        guard(made)
    first.release()
    guard(made)
