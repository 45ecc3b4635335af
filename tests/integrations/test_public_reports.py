"""Public bug reports of accelerate and axolotl, each as a program that must come out right here."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from torch import nn

import msamp
from helpers import dist, hosts
from helpers.numerics import make
from msamp.integrations import fsdp

accelerate = hosts.need("accelerate")
LEVELS = pytest.mark.parametrize("level", ["O1", "O2", "O3"])


@pytest.fixture(autouse=True)
def environment_as_before():
    """accelerate tells it of its ranks, and reads it."""
    with mock.patch.dict(os.environ):
        fresh_state()
        yield
        fresh_state()


def fresh_state() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for each in (AcceleratorState, GradientState, PartialState):
        each._reset_state()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))


def prepared(level: str | None, micro_batches: int = 1) -> tuple[Any, ...]:
    """An accelerator, and what it prepared; without a level accelerate's own, in FP32."""
    from msamp.integrations.accelerate import Accelerator

    fresh_state()
    settings = {"cpu": True, "gradient_accumulation_steps": micro_batches}
    accelerator = accelerate.Accelerator(**settings) if level is None else Accelerator(recipe=level, **settings)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    loader = torch.utils.data.DataLoader(make("normal", (128, 32)), batch_size=16 // micro_batches)
    return accelerator, *accelerator.prepare(model, optimizer, schedule, loader)


def epochs(number: int, accelerator: Any, model: nn.Module, optimizer: Any, schedule: Any, loader: Any) -> list[float]:
    """The loss of each optimizer step; step, schedule and zero_grad are called for each micro-batch, as accelerate's pages show it."""
    parts, losses = [], []
    for _ in range(number):
        for x in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - x).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            parts.append(loss.item())
            if accelerator.sync_gradients:
                losses.append(sum(parts) / len(parts))
                parts.clear()
    return losses


@LEVELS
@pytest.mark.parametrize("micro_batches", [1, 8])
def test_accumulated_micro_batches_do_not_collapse(level, micro_batches):
    """accelerate #2866: trainings with gradient_accumulation_steps > 1 collapsed; axolotl #1100: 16 rows and 8 times 2 differed."""
    want, got = (epochs(4, *prepared(each, count)) for each, count in ((None, 1), (level, micro_batches)))
    assert len(got) == len(want) == 32
    assert sum(got[-5:]) == pytest.approx(sum(want[-5:]), rel=0.015)


@LEVELS
def test_a_saved_state_continues_without_a_spike(level, tmp_path):
    """accelerate #1479: after save_state and load_state the loss jumped."""
    accelerator, *parts = prepared(level)
    epochs(2, accelerator, *parts)
    accelerator.save_state(str(tmp_path))
    want = epochs(2, accelerator, *parts)
    other, *fresh = prepared(level)
    other.load_state(str(tmp_path))
    rate = fresh[2].get_last_lr()
    got = epochs(2, other, *fresh)
    assert rate == [pytest.approx(3e-3 * 0.98**16)]
    assert got == want


def loaded_by_one_rank(sharded: bool) -> tuple[str, list[float]]:
    """The refusal or the losses of each rank where only rank 0 has read the weights."""
    model = net()
    if torch.distributed.get_rank():
        for p in model.parameters():
            p.data.fill_(float("nan"))
    if sharded:
        try:
            fsdp.prepare(model, "O2")
        except ValueError as error:
            return str(error), []
        return "", []
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "O2")
    losses = []
    for step in range(4):
        x = make("normal", (16, 32), step)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return "", losses


def test_weights_that_only_one_rank_has_read_make_no_nan():
    """axolotl #3077: with FSDP and FP8 the loss was NaN where ranks had weights of their own."""
    (_, first), (_, second) = dist.run(loaded_by_one_rank, 2, False)
    assert first == second  # of rank 0's weights
    assert all(loss < 2 for loss in first)
    (_, _), (refusal, _) = dist.run(loaded_by_one_rank, 2, True)
    assert "0.weight holds 2048 values that are NaN or infinite" in refusal
