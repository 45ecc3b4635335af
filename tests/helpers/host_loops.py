"""A host's model in a plain loop with the optimizer of `msamp.initialize`: compiled, and on several processes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

import msamp

Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module, int, int], torch.Tensor]  # of a model, the step, and which rank's rows
STEPS = 4


def begin(build: Build, level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, which nothing clips and which says so."""
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return msamp.initialize(model, optimizer, level, clip_grad=float("inf"))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, rows: int = 0, start: int = 0) -> list[float]:
    """The losses of some steps."""
    found = []
    for step in range(start, start + STEPS):
        value = loss(model, step, rows)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    return found


def check_the_compiled_model_trains_alike(build: Build, loss: Loss, level: str = "O2") -> None:
    """torch.compile gives the losses of the model as it is, and the weights have trained."""
    want = trained(*begin(build, level), loss)
    torch._dynamo.reset()
    model, optimizer = begin(build, level)
    got = trained(torch.compile(model, backend="aot_eager"), optimizer, loss)
    assert got == pytest.approx(want, rel=1e-2)
    assert got != [got[0]] * STEPS


def on_this_rank(build: Build, loss: Loss, level: str) -> dict[str, Any]:
    """What a rank finds, or the only process: losses where all ranks have the same rows, and weights where each has its own."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    same = trained(*begin(build, level), loss)
    model, optimizer = begin(build, level)
    trained(model, optimizer, loss, rank)
    return {"same rows": same, "weights": [msamp.fp32_values(p).detach().clone() for p in model.parameters()]}


def check_two_processes_are_one(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """With the same rows to the bit; with rows of their own both ranks have the same weights, and others than one rank's rows give."""
    for found in ranks:
        assert found["same rows"] == alone["same rows"]
        assert all(a.equal(b) for a, b in zip(found["weights"], ranks[0]["weights"], strict=True))
    assert not all(a.equal(b) for a, b in zip(ranks[0]["weights"], alone["weights"], strict=True))
