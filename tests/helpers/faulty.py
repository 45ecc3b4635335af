"""Whole runs of the tiny GPT whose steps fare badly: gradients spoiled, losses told too loud, signals that come in a step."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import tiny
from megatron.lm import step
from megatron.lm.config import Config
from megatron.lm.run import trainer
from megatron.lm.training.state import Batches, StepResult, Training

FIRST, NORM = "decoder.layers.1.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"
BATCH = 4  # sequences of a step of tiny's, on one process

Change = Callable[[StepResult, Training], StepResult]


def no_change(result: StepResult, training: Training) -> StepResult:
    return result


@contextlib.contextmanager
def patched(change: Change = no_change, spoil: Callable[[Training], list[str]] = lambda training: []) -> Iterator[None]:
    """Steps whose gradients of the parameters that `spoil` names become NaN on this rank, and whose result `change` changes."""

    def changed(training: Training, stream: Batches, *watchers: Any) -> StepResult:
        handles = [dict(training.model.named_parameters())[name].register_hook(lambda g: g * math.nan) for name in spoil(training)]
        try:
            return change(step.train_step(training, stream, *watchers), training)
        finally:
            for handle in handles:
                handle.remove()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", changed)
        yield


def at(*iterations: int, names: tuple[str, ...] = (FIRST,)) -> Callable[[Training], list[str]]:
    """For `patched`: which iterations to spoil."""
    return lambda training: list(names) if training.iteration + 1 in iterations else []


def told(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


def trained(settings: Config) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Rows that this rank would write, and the bits of its weights."""
    rows: list[dict[str, Any]] = []
    with tiny.trainer(settings) as made:
        made.metrics.write = rows.append  # type: ignore[method-assign]
        made.run()
        return rows, tiny.bits(made.training.model.parameters())


def louder(*iterations: int) -> Change:
    """For `patched`: the loss of some iterations is told ten times too large."""

    def change(result: StepResult, training: Training) -> StepResult:
        return replace(result, loss_sum=result.loss_sum * 10) if training.iteration in iterations else result

    return change


SPIKES = {"loss_spike_threshold": 3.0, "loss_spike_window": 3}


def rolling(prefix: Path | str, folder: Path | str, **settings: Any) -> Config:
    return tiny.config(prefix, save=str(folder), save_interval=4, loss_spike_action="rollback", **SPIKES, **settings)


class Once:
    """For `patched`: a loud loss at an iteration, the first so many times, on some ranks."""

    def __init__(self, iteration: int, times: int = 1, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.iteration, self.times, self.ranks = iteration, times, ranks

    def __call__(self, result: StepResult, training: Training) -> StepResult:
        if training.iteration != self.iteration or not self.times or torch.distributed.get_rank() not in self.ranks:
            return result
        self.times -= 1
        return louder(self.iteration)(result, training)


def signalled(number: int, iteration: int, ranks: tuple[int, ...] = (0,)) -> Change:
    """For `patched`: the process gets a signal in an iteration."""

    def change(result: StepResult, training: Training) -> StepResult:
        if training.iteration == iteration and torch.distributed.get_rank() in ranks:
            os.kill(os.getpid(), number)
        return result

    return change


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())
