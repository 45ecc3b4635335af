"""LowPrecisionOptimizer saved and loaded: bit for bit, or refused with nothing changed."""

import copy
import io

import pytest
import torch
from torch import nn

from helpers.fp8_adamw import TABLE6, parameter, snapshot
from helpers.numerics import make, same
from msamp.numerics.formats import E4M3, FP16, FP32
from msamp.numerics.recipe import FP32_STATES, O1, O2, O3, StateFormats
from msamp.optim.optimizer import LowPrecisionOptimizer


def trained(formats: StateFormats, weight=FP16, steps=4) -> tuple[list[nn.Parameter], LowPrecisionOptimizer]:
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
    ps, optimizer = trained(formats, weight)
    file = io.BytesIO()
    torch.save({"weights": ps, "optimizer": optimizer.state_dict()}, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    others, other = trained(formats, weight, steps=1)
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
    _, optimizer = trained(O2.states)
    before, groups = snapshot(optimizer), copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    with pytest.raises(
        ValueError, match=r"parameter group 0 was saved with formats .*this optimizer has .*build it with the saved formats"
    ):
        optimizer.load_state_dict(trained(saved)[1].state_dict())
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
