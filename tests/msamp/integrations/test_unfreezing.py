"""A part of a model that is unfrozen in the middle of a run, on one process and on two."""

import copy

import pytest
import torch
from torch import nn

import msamp
from helpers import dist
from helpers.numerics import make


def frozen_first(**settings) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return msamp.initialize(model, optimizer, "O2", **settings)


def run(how: str) -> list[torch.Tensor]:
    """Four steps, of which the last two train the first layer too; the weights. Ranks have rows of their own."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model[0].requires_grad_(False)
    params = model.parameters() if how == "held from the start" else model[2].parameters()
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(params, lr=1e-2), "O2", zero=False)
    before = msamp.fp32_values(model[0].weight).clone()
    for step in range(6):
        if step in (2, 4):
            model[0].requires_grad_(True)
            if how == "added" and step == 2:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-2})
            if how == "held from the start":
                optimizer.renew_grad_sync()
            state = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        x = make("normal", (16, 32), 10 * step + rank)
        (model(x) - x).square().mean().backward()
        optimizer.step()
    assert not msamp.fp32_values(model[0].weight).equal(before)
    return [msamp.fp32_values(p).clone() for p in model.parameters()]


@pytest.mark.promise("Hosts", "A layer unfrozen mid-run is trained and averaged, by `add_param_group` or `renew_grad_sync`.")
@pytest.mark.parametrize("how", ["added", "held from the start"])
def test_an_unfrozen_layer_is_trained_and_ranks_stay_equal(how):
    run(how)
    first, second = dist.run(run, 2, how)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def refusals() -> None:
    model, optimizer = frozen_first(zero=False)
    x = make("normal", (16, 32), torch.distributed.get_rank())
    groups = len(optimizer.param_groups)
    with pytest.raises(ValueError, match=r"2 of the 2 new parameters are not in this optimizer's model.*msamp\.initialize\(module"):
        optimizer.add_param_group({"params": list(nn.Linear(4, 4).parameters())})
    model[0].requires_grad_(True)
    model(x).square().mean().backward()
    with pytest.raises(ValueError, match=r"there are gradients of a backward.*zero_grad"):
        optimizer.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(ValueError, match=r"0\.weight .*renew_grad_sync\(\) of the optimizer of msamp\.initialize"):
        optimizer.step()
    assert len(optimizer.param_groups) == groups
    optimizer.zero_grad()
    optimizer.add_param_group({"params": list(model[0].parameters())})
    model(x).square().mean().backward()
    optimizer.step()
    spread, optimizer = frozen_first(zero=True)
    spread[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"ZeRO.*zero=False"):
        optimizer.add_param_group({"params": list(spread[0].parameters())})


def test_what_cannot_be_averaged_is_refused_with_the_way_out():
    dist.run(refusals, 2)
