"""What conversion keeps is still kept after load, copy, pickle, save and a second `initialize`, on one process and on two."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import msamp
from helpers import dist
from helpers.carried_over import WAYS, begin, carried, net, train
from helpers.choices import each_once
from helpers.numerics import make

pytestmark = pytest.mark.filterwarnings("ignore:less than half")


# ------------------------------------------------------------------------------------------- lists of parameters, hooks


def through_former_lists(way: str, level: str = "O2") -> tuple[bool, list[str], float, bool]:
    """Whether parameters stay, which hooks fire, the norm after clipping through the list, and whether freezing through it works."""
    model = net()
    params, fired = list(model.parameters()), []
    params[0].register_hook(lambda g: fired.append("hook"))
    params[2].register_post_accumulate_grad_hook(lambda p: fired.append("post"))
    pair = begin(level, model)
    train(*pair, range(2))
    model, optimizer = carried(way, pair, level)
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


# ----------------------------------------------------------------------------------------------------- a second stage


def moved_by_a_second_stage(ways: tuple[str, ...], level: str) -> dict[str, float]:
    """How far a second `initialize` moves the weights, relative to their norm, after each way; and that it trains afterwards."""
    moved = {}
    for way in ways:
        pair = begin(level)
        train(*pair, range(4))
        model, optimizer = carried(way, pair, level)
        before = {name: x.clone() for name, x in msamp.plain_state_dict(model, optimizer).items()}  # {} on the second rank under ZeRO
        model, optimizer = begin(level, model)
        after = msamp.plain_state_dict(model, optimizer)
        moved[way] = max((float((after[name] - x).norm() / x.norm()) for name, x in before.items()), default=0.0)
        train(model, optimizer, range(1))
    return moved


@pytest.mark.parametrize("level", ["O1", "O3", "coat"])
def test_a_second_stage_keeps_the_masters(level):
    assert max(moved_by_a_second_stage(WAYS, level).values()) < 1e-4


# -------------------------------------------------------------------------------------- states of torch's optimizers


def taken_over(way: str | None, level: str) -> list[float]:
    """Losses after 10 steps of torch's AdamW, 2 of the recipe that takes over its states, and a way."""
    model = net()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, given, range(10))
    pair = msamp.initialize(model, given, level, clip_grad=float("inf"))
    train(*pair, range(10, 12))
    return train(*(pair if way is None else carried(way, pair, level)), range(12, 16))


@each_once(level=["O1", "O3", "coat"], way=WAYS)
def test_states_that_were_taken_over_continue(way, level):
    """Bit for bit, but for what is set anew: a second call begins the windows of the scales again."""
    want, got = taken_over(None, level), taken_over(way, level)
    assert got == (pytest.approx(want, rel=0.01) if way == "second call" else want)


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
    assert "the group's first rank returns them; load the first rank's on every rank" in second


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
    pair = carried(way, pair, level)
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


@each_once(level=["O1", "O2", "O3"], way=WAYS)
def test_an_average_in_few_bits_warns_and_one_in_a_float_copy_follows(way, level):
    warned, off = average_of(way, level, in_floats=False)
    assert warned
    assert off > 0.2
    warned, off = average_of(way, level, in_floats=True)
    assert not warned
    assert off < 1e-3
