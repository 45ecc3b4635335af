"""A model with experts over two processes: averaged, sharded by Algorithm 1, saved and loaded."""

import pytest
import torch
import torch.distributed as dist

import msamp
from helpers.dist import run
from helpers.moe_model import EXPERTS, batch, initialized, train


def trained(recipe: str, zero: bool) -> tuple[list, dict, dict, int]:
    """Losses of four steps on half of each batch, plain weights, states, and the number of matrices that this rank updates."""
    model, optimizer = initialized(recipe, zero=zero)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, target = batch()
    losses = []
    for _ in range(4):
        loss = (model(x[rank::ranks]) - target[rank::ranks]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    experts = set(model.experts.parameters())
    owned = [h.rows for h in optimizer.holdings() if h.param in experts]
    assert all(rows is None for rows in owned)
    state = {i: {key: msamp.fp32_values(x) for key, x in own.items()} for i, own in optimizer.state_dict()["state"].items()}
    whole = msamp.plain_state_dict(model, optimizer)
    return losses, whole, state, len(owned)


@pytest.mark.parametrize("recipe", ["O3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("O1", "O2", "coat"))])
def test_two_processes_train_alike_with_and_without_zero(recipe):
    (one, other), (first, second) = run(trained, 2, recipe, False), run(trained, 2, recipe, True)
    assert one[0] == first[0]
    assert other[0] == second[0]
    assert all(x.equal(first[1][name]) for name, x in one[1].items())
    assert all(a.equal(b) for i, s in one[2].items() for a, b in zip(s.values(), first[2][i].values(), strict=True))
    assert first[3] + second[3] == 2 * EXPERTS, "whole matrices, each on one rank"
    assert min(first[3], second[3]) >= EXPERTS - 1
    single, optimizer = initialized(recipe, zero=False)
    train(single, optimizer, 4)
    assert (one[0][-1] + other[0][-1]) / 2 == pytest.approx(_loss(single), rel=0.1)


def _loss(model: torch.nn.Module) -> float:
    x, target = batch()
    with torch.no_grad():
        return (model(x) - target).square().mean().item()


def losses(recipe: str, zero: bool) -> list[float]:
    model, optimizer = initialized(recipe, zero=zero)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, target = batch()
    found = []
    for _ in range(3):
        loss = (model(x[rank::ranks].to(model.up.weight.dtype)).float() - target[rank::ranks]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
