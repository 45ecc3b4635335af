"""What conversion keeps is still kept after load, copy, pickle, save and a second `initialize`, on one process and on two."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm
from torch.optim.swa_utils import AveragedModel

import msamp
from helpers import dist
from helpers.numerics import make

Pair = tuple[nn.Module, torch.optim.Optimizer]
pytestmark = pytest.mark.filterwarnings("ignore:less than half")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def begin(level: str, model: nn.Module | None = None, lr: float = 1e-2) -> Pair:
    model = net() if model is None else model
    return msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=lr), level, clip_grad=float("inf"))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = make("normal", (16, 32), step)
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """A copy of its state; on several processes the first one's, which has all of it under ZeRO."""
    states = [optimizer.state_dict()]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(states)
    return copy.deepcopy(states[0])


def loaded_into_itself(pair: Pair, level: str) -> Pair:
    states = copy.deepcopy(pair[0].state_dict()), states_of(pair[1])
    pair[0].load_state_dict(states[0])
    pair[1].load_state_dict(states[1])
    return pair


def loaded_from_a_file(pair: Pair, level: str) -> Pair:
    file = io.BytesIO()
    torch.save([pair[0].state_dict(), states_of(pair[1])], file)
    states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    model, optimizer = begin(level)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    return model, optimizer


def second_call(pair: Pair, level: str) -> Pair:
    """The states of the first optimizer go into the second."""
    states = states_of(pair[1])
    model, optimizer = begin(level, pair[0])
    optimizer.load_state_dict(states)
    return model, optimizer


WAYS: dict[str, Callable[[Pair, str], Pair]] = {
    "load": loaded_into_itself,
    "copy": lambda pair, level: copy.deepcopy(pair),
    "pickle": lambda pair, level: pickle.loads(pickle.dumps(pair)),
    "save": loaded_from_a_file,
    "second call": second_call,
}
EACH_WAY = pytest.mark.parametrize("way", WAYS)
COLLECTIVE = ("load", "save", "second call")  # what a loop on several processes does


# ------------------------------------------------------------------------------------------- lists of parameters, hooks


def through_former_lists(way: str, level: str = "O2") -> tuple[bool, list[str], float, bool]:
    """Whether parameters stay, which hooks fire, the norm after clipping through the list, and whether freezing through it works."""
    model = net()
    params, fired = list(model.parameters()), []
    params[0].register_hook(lambda g: fired.append("hook"))
    params[2].register_post_accumulate_grad_hook(lambda p: fired.append("post"))
    pair = begin(level, model)
    train(*pair, range(2))
    model, optimizer = WAYS[way](pair, level)
    fired.clear()
    (100 * model(make("normal", (16, 32))).square().mean()).backward()
    said = sorted(fired)
    msamp.clip_grad_norm_(params, 1.0)
    clipped = float(msamp.clip_grad_norm_(params, 1.0))
    optimizer.step()
    optimizer.zero_grad()
    params[0].requires_grad_(False)
    before = msamp.fp32_values(params[0]).clone()
    if not torch.distributed.is_initialized():
        train(model, optimizer, range(1))
    same = all(p is q for p, q in zip(params, model.parameters(), strict=True))
    return same, said, clipped, msamp.fp32_values(params[0]).equal(before)


@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("way", ["load", "second call"])
def test_former_lists_and_hooks_still_act(way, level):
    same, fired, clipped, frozen = through_former_lists(way, level)
    assert same
    assert fired == ["hook", "post"]
    assert clipped == pytest.approx(1.0, rel=0.05)
    assert frozen


def test_so_they_do_on_two_processes():
    for same, fired, clipped, _ in dist.run(through_former_lists, 2, "second call"):
        assert same
        assert fired == ["hook", "post"]
        assert clipped == pytest.approx(1.0, rel=0.05)


# ----------------------------------------------------------------------------------------------------- a second stage


def moved_by_a_second_stage(ways: tuple[str, ...], level: str) -> dict[str, float]:
    """How far a second `initialize` moves the weights, relative to their norm, after each way; and that it trains afterwards."""
    moved = {}
    for way in ways:
        pair = begin(level)
        train(*pair, range(4))
        model, optimizer = WAYS[way](pair, level)
        before = {name: x.clone() for name, x in msamp.plain_state_dict(model, optimizer).items()}  # {} on the second rank under ZeRO
        model, optimizer = begin(level, model)
        after = msamp.plain_state_dict(model, optimizer)
        moved[way] = max((float((after[name] - x).norm() / x.norm()) for name, x in before.items()), default=0.0)
        train(model, optimizer, range(1))
    return moved


@pytest.mark.parametrize("level", ["O1", "O3", "coat"])
def test_a_second_stage_keeps_the_masters(level):
    assert max(moved_by_a_second_stage(tuple(WAYS), level).values()) < 1e-4


def test_so_it_does_on_two_processes():
    """O3, under ZeRO."""
    for moved in dist.run(moved_by_a_second_stage, 2, COLLECTIVE, "O3"):
        assert max(moved.values()) < 1e-4


# -------------------------------------------------------------------------------------- states of torch's optimizers


def taken_over(way: str | None, level: str) -> list[float]:
    """Losses after 10 steps of torch's AdamW, 2 of the recipe that takes over its states, and a way."""
    model = net()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, given, range(10))
    pair = msamp.initialize(model, given, level, clip_grad=float("inf"))
    train(*pair, range(10, 12))
    return train(*(pair if way is None else WAYS[way](pair, level)), range(12, 16))


@pytest.mark.parametrize("level", ["O1", "O3", "coat"])
@EACH_WAY
def test_states_that_were_taken_over_continue(way, level):
    """Bit for bit, but for what is set anew: a second call begins the windows of the scales again."""
    want, got = taken_over(None, level), taken_over(way, level)
    assert got == (pytest.approx(want, rel=0.01) if way == "second call" else want)


def taken_over_each_way(level: str) -> dict[str | None, list[float]]:
    return {way: taken_over(way, level) for way in (None, *COLLECTIVE)}


def test_so_do_they_on_two_processes():
    for found in dist.run(taken_over_each_way, 2, "O3"):
        for way in COLLECTIVE:
            assert found[way] == pytest.approx(found[None], rel=0.01)


def empty_states_loaded() -> str:
    """What is said where each rank loads its own state dict under ZeRO."""
    model, optimizer = begin("O3")
    train(model, optimizer, range(2))
    states = optimizer.state_dict()
    try:
        optimizer.load_state_dict(states)
    except ValueError as error:
        return str(error)
    return ""


def test_under_zero_the_empty_state_of_another_rank_is_refused():
    first, second = dist.run(empty_states_loaded, 2)
    assert first == ""
    assert "of the group's first rank has them; load the first rank's on every rank" in second


# ------------------------------------------------------------------------------------------------------------ averages


def slowly(average: torch.Tensor, p: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """At module level, so that pickle finds it."""
    return average * 0.999 + p * 0.001


def average_of(way: str, level: str, in_floats: bool) -> tuple[bool, float]:
    """Whether an average at 0.999 warned after a way, and how far it is from the true one, as a share of the way."""
    pair = begin(level, lr=1e-3)
    ema = AveragedModel(msamp.float_copy(pair[0]) if in_floats else pair[0], avg_fn=slowly)
    ema.update_parameters(pair[0])  # the first is a copy
    start = [msamp.fp32_values(p).clone() for p in pair[0].parameters()]
    true = [x.clone() for x in start]
    pair = WAYS[way](pair, level)
    if way in ("copy", "pickle"):
        ema = copy.deepcopy(ema) if way == "copy" else pickle.loads(pickle.dumps(ema))
    else:
        file = io.BytesIO()
        torch.save(ema.state_dict(), file)
        ema.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            train(*pair, range(step, step + 1))
            ema.update_parameters(pair[0])
            for x, p in zip(true, pair[0].parameters(), strict=True):
                x.lerp_(msamp.fp32_values(p), 0.001)
    off = sum(float((msamp.fp32_values(p) - x).norm()) for p, x in zip(ema.module.parameters(), true, strict=True))
    gone = sum(float((a - b).norm()) for a, b in zip(true, start, strict=True))
    return any("msamp.float_copy" in str(w.message) for w in caught), off / gone


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@EACH_WAY
def test_an_average_in_few_bits_warns_and_one_in_a_float_copy_follows(way, level):
    warned, off = average_of(way, level, in_floats=False)
    assert warned
    assert off > 0.2
    warned, off = average_of(way, level, in_floats=True)
    assert not warned
    assert off < 1e-3


def averages_each_way() -> list[tuple[bool, float]]:
    return [average_of(way, "O2", in_floats) for way in COLLECTIVE for in_floats in (False, True)]


def test_so_does_an_average_on_two_processes():
    for found in dist.run(averages_each_way, 2):
        assert [warned for warned, _ in found] == [True, False] * len(COLLECTIVE)
        assert all(off < 1e-3 for _, off in found[1::2])


# ------------------------------------------------------------------------- layers that stay, and what is refused in backward


def with_a_computed_weight() -> nn.Sequential:
    model = net()
    weight_norm(model[0])
    return model


def computed_weight_trains(ways: tuple[str, ...]) -> dict[str, list[float]]:
    found = {}
    for way in ("none", *ways):
        model, optimizer = begin("O2", with_a_computed_weight())
        train(model, optimizer, range(3))
        if way == "save":
            file = io.BytesIO()
            torch.save([model.state_dict(), states_of(optimizer)], file)
            states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            model, optimizer = begin("O2", with_a_computed_weight())
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        elif way != "none":
            model, optimizer = WAYS[way]((model, optimizer), "O2")
        assert type(model[0]) is nn.Linear
        found[way] = train(model, optimizer, range(3, 6))
    return found


def test_a_layer_with_a_computed_weight_trains_on_each_way():
    found = computed_weight_trains(COLLECTIVE)
    assert found["load"] == found["save"] == found["none"]
    assert found["second call"] == pytest.approx(found["none"], rel=0.01)


def test_so_it_does_on_two():
    first, second = dist.run(computed_weight_trains, 2, COLLECTIVE)
    assert first == second
    assert all(losses == pytest.approx(first["none"], rel=0.01) for losses in first.values())


@EACH_WAY
def test_second_derivatives_and_transforms_are_refused_each_way(way):
    pair = begin("O2")
    train(*pair, range(2))
    model, _ = WAYS[way](pair, "O2")
    x = make("normal", (4, 32)).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"0\.weight was called under a .*exclude_names"):
        torch.func.vmap(model)(x.detach())
