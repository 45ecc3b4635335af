"""A second optimizer of torch that no source file knows: `msamp.initialize` takes a `torch.optim.RMSprop`.

Its update is registered here, and a row of `takeover.ACCEPTED` names it. Its state, `square_avg`, has the format of the recipe's second
moment: FP16 with a scale at O2.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import msamp
from msamp.integrations import takeover
from msamp.kernels.reference.adamw import GRAD
from msamp.kernels.reference.store import load, store_
from msamp.kernels.tables import Tables
from msamp.optim import updates
from msamp.optim.updates import MASTER, State, StepInputs, Update, UpdateBatch


class RMSprop(Update):
    """v = alpha v + (1 - alpha) g^2;  p = p - lr g / (sqrt(v) + eps)."""

    def options(self) -> dict[str, Any]:
        return {"alpha": 0.99, "eps": 1e-8}

    def check_numbers(self, group: Mapping[str, Any]) -> None:
        super().check_numbers(group)
        for option in ("momentum", "centered", "weight_decay"):
            if group.get(option):
                raise ValueError(f"{option} is {group[option]}; update 'rmsprop' supports 0 only: build the optimizer without it")

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        return [float(group["lr"]), group["alpha"], group["eps"]]

    def run(self, tables: Tables, batch: UpdateBatch, inputs: StepInputs) -> None:
        amaxes, kept, coefficient, usable = inputs
        if not usable:
            return
        lr, alpha, eps = batch.hyper.tolist()
        clip = torch.ones(()) if coefficient is None else coefficient
        averages, masters = load(batch.states["square_avg"]), load(batch.masters)
        torch._foreach_add_(batch.steps, 1)
        for average, master, g in zip(averages, masters, batch.grads, strict=True):
            g = msamp.fp32_values(g) * clip
            average.mul_(alpha).addcmul_(g, g, value=1 - alpha)
            master.addcdiv_(g, average.sqrt().add_(eps), value=-lr)
        bounds = alpha * amaxes[1, batch.indices] + (1 - alpha) * (amaxes[GRAD, batch.indices] * clip).square()
        step = lr / (1 - alpha) ** 0.5  # no element moves further
        master_bounds = amaxes[self.master_row, batch.indices] + step
        store_(batch.states["square_avg"], averages, bounds)
        store_(batch.masters, masters, master_bounds)
        if batch.weights:
            store_(batch.weights, load(batch.masters), master_bounds)
        kept[: self.master_row, batch.places] = self.stored_amaxes(batch)


@pytest.fixture(autouse=True)
def accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    updates.register(RMSprop("rmsprop", (MASTER, State("square_avg", "v", "v", non_negative=True)), kept=("square_avg",)))
    monkeypatch.setitem(takeover.ACCEPTED, "RMSprop", "rmsprop")


def trained(recipe: str | None, steps: int = 20) -> tuple[nn.Module, Any, list[float]]:
    """A small model, by torch itself where `recipe` is None."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer: Any = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9)
    if recipe is not None:
        model, optimizer = msamp.initialize(model, optimizer, recipe=recipe, master_rounding="nearest", moment_rounding="nearest")
    x, losses = torch.randn(64, 32), []
    for _ in range(steps):
        loss = (model(x) - x).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, optimizer, losses


def test_in_fp32_it_is_torch_s():
    expected, ours = trained(None)[2], trained("fp32")[2]
    assert ours == pytest.approx(expected, rel=1e-5)


def test_it_trains_at_o2_with_its_state_in_the_format_of_the_second_moment_and_resumes():
    model, optimizer, losses = trained("O2")
    assert losses[-1] < 0.7 * losses[0]
    kept = optimizer.state[model[0].weight]["square_avg"]
    assert isinstance(kept, msamp.ScalingTensor)
    assert kept.format == msamp.formats.FP16
    again, other, _ = trained("O2", steps=0)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert other.state[again[0].weight]["square_avg"].payload.equal(kept.payload)


def test_what_its_update_refuses_is_refused_by_initialize():
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"momentum is 0\.9; update 'rmsprop' supports 0 only"):
        msamp.initialize(model, torch.optim.RMSprop(model.parameters(), momentum=0.9))
