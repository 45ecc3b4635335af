"""`msamp.PrecisionGuard` in a loop: outliers that come and go, resume bit for bit, copies, two processes, and what it refuses."""

import copy
import logging

import pytest
import torch
from torch import nn

import msamp
from helpers import dist
from helpers.mlp_loop import adamw
from msamp.numerics import recipe
from msamp.numerics.scaling import Delayed

WINDOW, AT, UNTIL, STEPS = 2, 6, 14, 30
SHORT = recipe.O2.with_scaling(Delayed(WINDOW))
OPTIONS = {"every": 2, "raise_after": 2, "return_after": 2, "saturation": 0.05}  # one of these tensors' elements is 0.002 of them


class Net(nn.Module):
    """Two layers; the second one's input has a channel that `outlier` multiplies."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.outlier = nn.Linear(32, 64), nn.Linear(64, 16), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = nn.functional.relu(self.first(x))
        return self.second(torch.cat([a[:, :1].detach() * self.outlier, a[:, 1:]], 1))


def start(level: recipe.Recipe = SHORT, **options):
    model, optimizer = msamp.initialize(Net(), None, level)
    return model, optimizer, msamp.PrecisionGuard(model, optimizer, **OPTIONS | options)


def train(model, optimizer, guard, steps, rank=0):
    """The changes of some steps; the outlier is there from step AT to UNTIL."""
    changes = []
    for step in steps:
        model.outlier = 2.0**24 if AT <= step < UNTIL else 1.0
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        (model(x)[:, 1:] - x[:, 1:16]).square().mean().mul(1 / model.outlier).backward()
        optimizer.step()
        changes += guard.step()
    return changes


@pytest.mark.parametrize("level", [recipe.O1, recipe.O2, recipe.O3], ids=lambda r: r.name)
def test_a_layer_is_raised_while_its_input_has_an_outlier(level, caplog):
    with caplog.at_level(logging.WARNING, "msamp"):
        made = start(level.with_scaling(Delayed(WINDOW)))
        changes = train(*made, range(1, UNTIL + 1))
        assert "computed in BF16 by its guard: second" in str(msamp.survey(made[0]))
        changes += train(*made, range(UNTIL + 1, STEPS + 1))
    assert [(change.layer, change.raised) for change in changes] == [("second", True), ("second", False)]
    raised, returned = changes
    assert AT < raised.step <= UNTIL < returned.step
    assert raised.why.startswith("input underflow")
    assert returned.steps == returned.step - raised.step
    assert [record.message for record in caplog.records] == [f"step {change.step}: {change}" for change in changes]
    assert msamp.survey(made[0]).flop_share == 1.0


def test_a_normal_run_keeps_its_bits():
    made = start()
    plain = msamp.initialize(Net(), None, SHORT)
    for step in range(1, 7):
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step))
        for model, optimizer in (made[:2], plain):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert made[2].step() == []
    for p, q in zip(made[0].parameters(), plain[0].parameters(), strict=True):
        assert torch.equal(msamp.fp32_values(p), msamp.fp32_values(q))


@pytest.mark.parametrize("at", [AT + 2, AT + 5, UNTIL + 2])
def test_resumed_it_is_the_same_run(at):
    """Before the raise with one bad check, while raised in an unmeasured step, and before the return."""
    whole = start()
    changes = train(*whole, range(1, STEPS + 1))
    model, optimizer, guard = first = start()
    before = train(*first, range(1, at + 1))
    saved = copy.deepcopy([one.state_dict() for one in (model, optimizer, guard)])
    again = start()
    for one, state in zip(again, saved, strict=True):
        one.load_state_dict(state)
    assert before + train(*again, range(at + 1, STEPS + 1)) == changes
    for p, q in zip(whole[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(msamp.fp32_values(p), msamp.fp32_values(q))


def of_rank(steps: int):
    """Rank 1 alone has the outlier's inputs; both must decide the same."""
    rank = torch.distributed.get_rank()
    model, optimizer, guard = start()
    changes, bits = [], []
    for step in range(1, steps + 1):
        model.outlier = 2.0**24 if rank and AT <= step < UNTIL else 1.0
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        (model(x)[:, 1:] - x[:, 1:16]).square().mean().mul(1 / model.outlier).backward()
        optimizer.step()
        changes += guard.step()
    bits = [msamp.fp32_values(p).sum().item() for p in model.parameters()]
    try:
        copy.deepcopy(guard)
    except ValueError as refusal:
        return [tuple(change) for change in changes], bits, str(refusal)
    return None


def test_two_processes_decide_together():
    (changes, bits, refusal), other = dist.run(of_rank, 2, STEPS)
    assert other == (changes, bits, refusal)
    assert [(layer, raised) for _, layer, raised, *_ in changes] == [("second", True), ("second", False)]
    assert "of several processes cannot be copied" in refusal


def test_refused():
    model, optimizer = msamp.initialize(Net(), None, SHORT)
    with pytest.raises(ValueError, match="optimizer is a AdamW; pass the one"):
        msamp.PrecisionGuard(model, adamw(model))
    with pytest.raises(ValueError, match="underflow must"):
        msamp.PrecisionGuard(model, optimizer, underflow=2)
    guard = msamp.PrecisionGuard(model, optimizer, every=1)
    with pytest.raises(ValueError, match="no FP8 layer ran in step 1"):
        guard.step()


class DTensor(nn.Parameter):
    """Has the name of what fully_shard makes of a parameter."""


def test_layers_sharded_by_fsdp2_are_refused():
    model, optimizer = msamp.initialize(Net(), None, SHORT)
    model.first.weight = DTensor(torch.zeros(64, 32))
    with pytest.raises(ValueError, match=r"first is sharded by FSDP2, whose weights cannot be raised; use msamp.initialize"):
        msamp.PrecisionGuard(model, optimizer)
