"""States of torch's optimizers and of other recipes, taken over in an optimizer's own formats."""

import copy
import itertools

import pytest
import torch
from torch import nn

import msamp
from helpers.choices import every_value
from msamp.optim.foreign_states import packed_names, unpacked_names


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def resumed(make, level: str, how: str) -> tuple[list[float], list[float]]:
    """Losses of torch's optimizer after 20 steps, and of the recipe that takes over its states."""
    model = mlp()
    given = make(model)
    train(model, given, 20)
    weights, states = copy.deepcopy((model.state_dict(), given.state_dict()))
    other, torchs = mlp(), None
    other.load_state_dict(weights)
    torchs = make(other)
    if how == "given":
        torchs.load_state_dict(states)
    other, low = msamp.initialize(other, torchs, recipe=level, clip_grad=float("inf"))
    if how == "loaded":
        low.load_state_dict(states)
    return train(model, given, 5, 20), train(other, low, 5, 20)


LEVELS = ("fp32", "O1", "O2", "O3", "coat")


@pytest.mark.promise("Optimizer states", "A stepped torch AdamW or SGD is taken over with its moments.")
@every_value
@pytest.mark.parametrize(("make", "level"), [*((adamw, level) for level in LEVELS), *((sgd, level) for level in LEVELS[:-1])])
@pytest.mark.parametrize("how", ["given", "loaded"])
@pytest.mark.filterwarnings("ignore")
def test_a_stepped_optimizer_of_torch_continues_in_every_recipe(make, level, how):
    expected, losses = resumed(make, level, how)
    assert losses == pytest.approx(expected, rel=1e-6 if level == "fp32" else 0.05)


@pytest.mark.parametrize(("first", "second"), [*itertools.pairwise(LEVELS), *itertools.pairwise(LEVELS[::-1])])
@pytest.mark.filterwarnings("ignore")
def test_states_of_another_recipe_continue(first, second):
    model = mlp()
    model, low = msamp.initialize(model, adamw(model), recipe=first)
    train(model, low, 20)
    weights, states = copy.deepcopy((msamp.plain_state_dict(model, low), low.state_dict()))
    expected = train(model, low, 5, 20)
    other = mlp()
    other.load_state_dict(weights)
    other, its = msamp.initialize(other, adamw(other), recipe=second)
    its.load_state_dict(states)
    assert train(other, its, 5, 20) == pytest.approx(expected, rel=0.05)


MOVES = [("O3", "O2", torch.float32), ("O2", "O3", torch.float32), ("O2", "coat", torch.float32), ("O3", "O3", torch.bfloat16)]


@pytest.mark.parametrize(("first", "second", "dtype"), MOVES)
def test_masters_that_were_not_saved_begin_with_the_weights_and_their_bits_are_not_lost_silently(first, second, dtype, recwarn):
    (model, low), (other, its) = (msamp.initialize(each := mlp(), adamw(each), recipe=level) for level in (first, second))
    train(model, low, 2)
    other.to(dtype).load_state_dict(model.state_dict())
    its.load_state_dict(low.state_dict())
    its.reload_model_params()
    assert ["master" in its.state[p] for p in other[0].parameters()] == [second != "O2", dtype == torch.bfloat16]
    assert any("only the bits of the weights that were loaded or written" in str(w.message) for w in recwarn) == (first != second)


@pytest.mark.promise("Optimizer states", "COAT's packed moments are never read as values by torch's AdamW.")
def test_coat_s_payloads_are_no_values_for_torch():
    model = mlp()
    model, low = msamp.initialize(model, adamw(model), recipe="coat")
    train(model, low, 2)
    state = copy.deepcopy(low.state_dict())
    assert "exp_avg" not in state["state"][0]
    other = mlp()
    optimizer = adamw(other)
    optimizer.load_state_dict(state)
    with pytest.raises(KeyError, match="exp_avg"):
        train(other, optimizer, 1)
    former = {**state, "state": unpacked_names(state["state"])}  # as it was saved before the names
    for each in (state, former):
        low.load_state_dict(each)
        assert all(x.equal(state["state"][0][key]) for key, x in low.state_dict()["state"][0].items())
    assert packed_names(former["state"]).keys() == state["state"].keys()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (sgd, r"but this optimizer requires exp_avg"),
        (lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), "optimizer option amsgrad=True"),
    ],
)
def test_states_that_no_moment_follows_from_are_refused(make, message):
    plain = mlp()
    given = make(plain)
    train(plain, given, 1)
    model = mlp()
    model, low = msamp.initialize(model, adamw(model), recipe="O2")
    train(model, low, 1)
    before = copy.deepcopy(low.state_dict())
    with pytest.raises(ValueError, match=message):
        low.load_state_dict(given.state_dict())
    assert low.state_dict()["state"][0]["exp_avg"].equal(before["state"][0]["exp_avg"])


def test_the_states_of_a_conv1d_are_turned_with_its_weight():
    layer = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})()
    layer.weight, layer.bias = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.zeros(32))
    given = torch.optim.AdamW(layer.parameters())
    layer.weight.grad = torch.randn(32, 32)
    given.step()
    moment = given.state[layer.weight]["exp_avg"].clone()
    model, low = msamp.initialize(nn.Sequential(layer), given, recipe="O1")
    assert low.state[model[0].weight]["exp_avg"].equal(moment.t())
