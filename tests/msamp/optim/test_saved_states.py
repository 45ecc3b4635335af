"""Optimizer states as they were saved: taken over, or refused before anything changes."""

import copy

import pytest
import torch
from torch import nn

from helpers.fp8_adamw import TABLE6, parameter, snapshot
from helpers.numerics import make, same, through_a_file
from msamp.numerics.formats import BF16, COAT_E4M3, COAT_E5M2, E4M3, E5M2, FP16, FP32
from msamp.numerics.recipe import FP32_STATES, O1, O2, O3, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.states import begun, check_state, expected_moment, parameter_names, payload, saved_states


def trained(**options) -> torch.optim.SGD:
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1, momentum=0.9, **options)
    for p in params[::2]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_states_come_back_as_they_were_saved_by_number_of_parameter_and_none_is_left_over():
    saved = trained().state_dict()
    saved["state"][0]["momentum_buffer"] = torch.full((3,), 1.001)  # FP32 beside a BF16 parameter
    found = saved_states(optimizer := trained(), saved, "momentum")
    assert list(found) == [0, 2]
    assert found[0]["momentum_buffer"] is saved["state"][0]["momentum_buffer"]
    saved["state"] = {str(number): state for number, state in saved["state"].items()}
    with pytest.raises(ValueError, match=r"states of '[02]', which no parameter group has: they go by number"):
        saved_states(optimizer, saved, "momentum")


def test_hooks_of_loading_see_the_whole_state_and_may_replace_it():
    optimizer, seen = LowPrecisionOptimizer([p := nn.Parameter(torch.ones(3))]), []
    p.grad = torch.ones(3)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "state": {0: state["states"][0]}})
    optimizer.register_load_state_dict_post_hook(lambda own: seen.append(own.state[p]["exp_avg"].clone()))
    optimizer.load_state_dict({"states": saved["state"], "param_groups": saved["param_groups"]})
    assert seen[0].equal(saved["state"][0]["exp_avg"])


def test_another_option_is_refused_before_anything_changes():
    optimizer, saved = trained(), trained(nesterov=True).state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    message = "parameter group 0 was saved with nesterov True, this optimizer has False; build it with the saved nesterov, or"
    with pytest.raises(ValueError, match=message):
        saved_states(optimizer, saved, "nesterov")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == 2
    del saved["param_groups"][0]["nesterov"]
    with pytest.raises(ValueError, match="saved with nesterov None"):
        saved_states(optimizer, saved, "nesterov")


def test_other_numbers_and_names_of_parameters_are_refused():
    def named(*names: str) -> torch.optim.Optimizer:
        return torch.optim.SGD([(name, nn.Parameter(torch.ones(3))) for name in names], lr=0.1)

    assert parameter_names(named("a", "b")) == ["a", "b"]
    assert parameter_names(trained())[:2] == ["parameter 0 of group 0", "parameter 0 of group 1"]
    for name in ("b", "parameter 1 of group 0", "_orig_mod.b"):  # its own, none (`add_param_group`), torch.compile's
        saved_states(named("a", "b"), named("a", name).state_dict(), "momentum")
    with pytest.raises(ValueError, match="parameter group 0 was saved with b, but this optimizer has a; build the optimizer like"):
        saved_states(named("a", "b"), named("b", "a").state_dict(), "momentum")
    with pytest.raises(ValueError, match="parameter group 0 was saved with 1 parameters, this optimizer has 2"):
        saved_states(named("a", "b"), named("a").state_dict(), "momentum")


WHOLE = torch.Size((4, 256))


def state_of(fmt) -> dict[str, torch.Tensor]:
    return begun("exp_avg_sq", fmt, torch.ones(WHOLE))


@pytest.mark.parametrize("fmt", [FP32, BF16, FP16, E4M3, E5M2, COAT_E4M3, COAT_E5M2], ids=str)
def test_a_saved_state_is_held_to_its_format_and_shape(fmt):
    expected = expected_moment("exp_avg_sq", fmt, WHOLE, non_negative=True)
    check_state("w", state_of(fmt), expected)
    for other in (FP32, BF16, FP16, E4M3, E5M2, COAT_E4M3, COAT_E5M2):
        if other != fmt:
            with pytest.raises(ValueError, match=r"the state of w (lacks|has unknown)|exp_avg_sq of w is torch.*this optimizer stores"):
                check_state("w", state_of(other), expected)
    for shape in ((256, 4), (4, 255), (4, 256, 1)):
        with pytest.raises(ValueError, match=r"of w is torch.*this optimizer stores"):
            check_state("w", begun("exp_avg_sq", fmt, torch.ones(shape)), expected)
    with pytest.raises(ValueError, match="exp_avg_sq of w is a list, but this optimizer stores"):
        check_state("w", state_of(fmt) | {"exp_avg_sq": [0.0]}, expected)
    with pytest.raises(ValueError, match="the state of w lacks exp_avg_sq"):
        check_state("w", {}, expected)
    check_state("w", {}, expected, whole=False)


def stored(values: torch.Tensor, fmt) -> torch.Tensor:
    return ScalingTensor.quantize(values, fmt) if fmt.scaled else values.to(fmt.dtype)


@pytest.mark.parametrize("fmt", [FP32, BF16, FP16, E4M3, E5M2], ids=str)
def test_a_saved_state_is_held_to_what_it_can_hold(fmt):
    expected = expected_moment("exp_avg_sq", fmt, WHOLE, non_negative=True)
    bad = make("normal", WHOLE).abs()
    bad[1, 2] = -1.0
    with pytest.raises(ValueError, match=r"exp_avg_sq of w holds -.*; the minimum is 0"):
        check_state("w", {"exp_avg_sq": stored(bad, fmt)}, expected)
    check_state("w", {"exp_avg_sq": stored(bad, fmt)}, expected_moment("exp_avg_sq", fmt, WHOLE, non_negative=False))
    x = stored(bad.abs(), fmt)
    payload(x).flatten()[:2] = torch.tensor(float("nan")).to(fmt.dtype)
    with pytest.raises(ValueError, match="exp_avg_sq of w holds 2 values that are NaN or infinite"):
        check_state("w", {"exp_avg_sq": x}, expected)


@pytest.mark.parametrize(("key", "value"), [("_max", -1.0), ("_max", float("nan")), ("_k", 0.0), ("_k", float("inf"))])
def test_numbers_of_groups_that_cannot_be_are_refused(key, value):
    state = state_of(COAT_E4M3)
    state[f"exp_avg_sq{key}"][0, 0] = value
    with pytest.raises(ValueError, match=f"exp_avg_sq{key} of w holds"):
        check_state("w", state, expected_moment("exp_avg_sq", COAT_E4M3, WHOLE, non_negative=True))


def trained_of_optimizer_state_dict(formats: StateFormats, weight=FP16, steps=4) -> tuple[list[nn.Parameter], LowPrecisionOptimizer]:
    ps = [parameter(weight=weight), nn.Parameter(make("normal", (7,)))]
    groups = [{"params": ps[:1], "lr": 0.02}, {"params": ps[1:], "formats": FP32_STATES, "weight_decay": 0.0}]
    optimizer = LowPrecisionOptimizer(groups, lr=0.01, formats=formats, clip_grad=1.0)
    go_on(ps, optimizer, range(steps))
    return ps, optimizer


def go_on(ps: list[nn.Parameter], optimizer: LowPrecisionOptimizer, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(ps):
            p.grad = make("normal", p.shape, seed=10 * step + i)
        optimizer.step()


@pytest.mark.parametrize("name", [*TABLE6, "O3"])
def test_a_loaded_optimizer_goes_on_bit_for_bit(name):
    formats, weight = (O3.states, E4M3) if name == "O3" else (TABLE6[name], FP16)
    ps, optimizer = trained_of_optimizer_state_dict(formats, weight)
    loaded = through_a_file({"weights": ps, "optimizer": optimizer.state_dict()}, weights_only=True)
    others, other = trained_of_optimizer_state_dict(formats, weight, steps=1)
    with torch.no_grad():
        for p, q in zip(others, loaded["weights"], strict=True):
            p.copy_(q)
    other.load_state_dict(loaded["optimizer"])
    assert same(snapshot(other), snapshot(optimizer))
    assert [g["lr"] for g in other.param_groups] == [0.02, 0.01]
    go_on(ps, optimizer, range(4, 8))
    go_on(others, other, range(4, 8))
    assert same(snapshot(other), snapshot(optimizer))


@pytest.mark.parametrize("saved", [O1.states, TABLE6["#4"], TABLE6["coat"], FP32_STATES], ids=str)
def test_states_in_other_formats_are_refused_and_nothing_changes(saved):
    _, optimizer = trained_of_optimizer_state_dict(O2.states)
    before, groups = snapshot(optimizer), copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    with pytest.raises(
        ValueError, match=r"parameter group 0 was saved with formats .*this optimizer has .*build it with the saved formats"
    ):
        optimizer.load_state_dict(trained_of_optimizer_state_dict(saved)[1].state_dict())
    assert same(snapshot(optimizer), before)
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups


@pytest.mark.parametrize("formats", [O2.states, FP32_STATES], ids=["O2", "fp32"])
def test_a_state_dict_of_torch_is_refused(formats):
    p = parameter(weight=FP32)
    theirs = torch.optim.AdamW([p])
    p.grad = torch.ones_like(p)
    theirs.step()
    with pytest.raises(ValueError, match="parameter group 0 was saved with formats None"):
        LowPrecisionOptimizer([p], formats=formats).load_state_dict(theirs.state_dict())
