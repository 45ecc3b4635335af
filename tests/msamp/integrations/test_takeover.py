"""The public parts of which an integration of one's own is made. What `msamp.initialize` does with them: test_initialize.py."""

import copy

import pytest
import torch
from torch import nn

import msamp
from helpers.moe_model import KEEP, Mixture, train
from helpers.numerics import make
from msamp.integrations.loop_optimizer import LoopOptimizer
from msamp.integrations.takeover import (
    check_optimizer,
    chosen_recipe,
    defaults_of,
    parameter_groups,
    retire,
)
from msamp.nn.scaling_state import ScalingState
from msamp.numerics import recipe as recipes


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(make("normal", (4, 16))).square().sum().backward()
    optimizer.step()


def test_an_integration_of_one_s_own_is_initialize_bit_for_bit():
    torch.manual_seed(3)
    plain, other = nn.Linear(16, 16), nn.Linear(16, 16)
    other.load_state_dict(plain.state_dict())
    given = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    recipe = chosen_recipe("O1", None, None)
    check_optimizer(given, recipe)
    model = msamp.convert(nn.Sequential(plain), recipe)
    low = LoopOptimizer(parameter_groups(given, model, recipe), recipe, ScalingState(model), **defaults_of(given))
    retire(given, low)
    same, usual = msamp.initialize(nn.Sequential(other), torch.optim.AdamW(other.parameters(), lr=1e-2), recipe="O1")
    for _ in range(2):
        step(model, low)
        step(same, usual)
    for own, theirs in zip(model.parameters(), same.parameters(), strict=True):
        assert msamp.fp32_values(own).equal(msamp.fp32_values(theirs))
    assert given.param_groups is low.param_groups
    with pytest.raises(ValueError, match=r"this optimizer was replaced by msamp\.initialize"):
        given.step()


def test_the_recipe_is_the_one_that_all_arguments_name():
    assert chosen_recipe(None, None, None) == recipes.O2
    assert chosen_recipe(recipes.O3, "O3", None) == recipes.O3
    assert chosen_recipe("O1", None, "mxfp8").gemm == recipes.GEMMS["mxfp8"]
    with pytest.raises(ValueError, match="recipe is 'O1' and opt_level is 'O2'"):
        chosen_recipe("O1", "O2", None)


def test_the_states_of_experts_are_divided_among_their_matrices():
    model = Mixture()
    adamw = torch.optim.AdamW(model.named_parameters(), lr=3e-3)
    train(model, adamw, 5)
    before = {name: adamw.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    want = train(*_continued(model, adamw), 1)
    model, low = msamp.initialize(model, adamw, "O1", accept=KEEP)
    names = low.param_groups[0]["param_names"]
    assert names == [name for name, _ in model.named_parameters()]
    moments = [low.state[p]["exp_avg"] for p in model.experts.fc1_weight.matrices]
    assert torch.stack(moments).equal(before["experts.fc1_weight"])
    assert all(int(low.state[p]["step"]) == 5 for p in model.parameters())
    assert train(model, low, 1) == pytest.approx(want, rel=0.03)


def _continued(model: nn.Module, adamw: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy of both, in FP32."""
    again = Mixture()
    again.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(again.named_parameters(), lr=3e-3)
    other.load_state_dict(copy.deepcopy(adamw.state_dict()))
    return again, other
