"""A second `msamp.initialize` on a model: masters are carried over, and another way to store or cast weights is refused."""

import pytest
import torch
from torch import nn

import msamp
from helpers import dist


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()


def jump(level: str) -> tuple[float, float, list[str]]:
    """How far the weights move by a second call and by one more step, relative to their norm; what the first optimizer says then."""
    model = mlp()
    model, first = msamp.initialize(model, adamw(model), recipe=level, clip_grad=float("inf"))
    train(model, first)
    before = msamp.plain_state_dict(model, first)
    before = {name: x.clone() for name, x in (before or model.state_dict()).items()}
    model, second = msamp.initialize(model, adamw(model), recipe=level, clip_grad=float("inf"))
    after = {name: x.clone() for name, x in (msamp.plain_state_dict(model, second) or before).items()}
    moved = max(float((after[name].float() - before[name].float()).norm() / before[name].float().norm()) for name in before)
    words = []
    try:
        first.step()
    except ValueError as error:
        words.append(str(error))
    second.load_state_dict(second.state_dict()) if not torch.distributed.is_initialized() else None
    train(model, second, 1)
    third = msamp.plain_state_dict(model, second) or before
    stepped = max(float((third[name].float() - after[name].float()).norm()) for name in before)
    return moved, stepped, words


@pytest.mark.promise("Conversion", "A second `initialize` of the same recipe carries the masters over.")
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "coat", "bf16"])
@pytest.mark.filterwarnings("ignore")
def test_a_second_stage_of_the_same_recipe_keeps_the_masters_and_retires_the_first_optimizer(level):
    moved, stepped, words = jump(level)
    assert moved < 1e-4
    assert stepped > 0
    assert "replaced this optimizer" in words[0]


@pytest.mark.parametrize("level", ["O2", "O3"])  # O3 under ZeRO
def test_a_second_stage_on_two_processes_keeps_the_masters(level):
    for moved, _, words in dist.run(jump, 2, level):
        assert moved < 1e-4
        assert "replaced this optimizer" in words[0]


@pytest.mark.parametrize(("first", "second"), [("O1", "O3"), ("O3", "coat"), ("O2", "fp32"), ("coat", "bf16")])
def test_another_way_to_store_or_cast_weights_is_refused_with_the_standing_recipe(first, second):
    model = mlp()
    model, optimizer = msamp.initialize(model, adamw(model), recipe=first)
    before = {name: x.clone() for name, x in msamp.plain_state_dict(model, optimizer).items()}
    with pytest.raises(ValueError, match=rf"0 is already in FP8 with '{first}'.*recipe '{second}'.*plain_state_dict"):
        msamp.initialize(model, adamw(model), recipe=second)
    assert all(x.equal(before[name]) for name, x in msamp.plain_state_dict(model, optimizer).items())
    train(model, optimizer, 1)


def test_a_frozen_base_that_was_converted_by_itself_takes_a_trained_layer_of_another_recipe():
    """As adapters over a base of one byte: no optimizer holds its weights, so their format is nobody's to refuse."""
    base = msamp.convert(mlp(), msamp.recipes.by_name("O3")).requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(32, 32))
    before = [p.payload.view(torch.uint8).clone() for p in (base[0].weight, base[2].weight)]
    model, optimizer = msamp.initialize(model, adamw(model[1]), recipe="O2")
    train(model, optimizer)
    for p, bits in zip((base[0].weight, base[2].weight), before, strict=True):
        assert p.payload.view(torch.uint8).equal(bits)
