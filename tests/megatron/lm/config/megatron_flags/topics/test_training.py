"""The lines of training: a sample, told apart by their values."""

import gc
from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from megatron.lm.config.megatron_flags.topics.training import FLAGS
from megatron.lm.run import trainer

BY_LINE = {row.line: row.verdict.treatment for row in FLAGS}


@pytest.mark.parametrize(("line", "treatment"), [("--optimizer adam", "dropped"), ("--optimizer TEXT", "refused"), ("--lr X", "accepted")])
def test_the_optimizer_is_adamw(line, treatment):
    assert BY_LINE[line] == treatment


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_steps_leave_no_reference_cycles_so_that_manual_gc_has_nothing_to_do(prefix: Path, monkeypatch: pytest.MonkeyPatch, level: str):
    collected: list[int] = []
    train_step = trainer.train_step

    def counted(*args: Any) -> Any:
        collected.append(gc.collect())
        gc.disable()  # what a step leaves is counted before the next one
        return train_step(*args)

    monkeypatch.setattr(trainer, "train_step", counted)
    try:
        tiny.run(tiny.config(prefix, opt_level=level, train_iters=8))
    finally:
        gc.enable()
    assert len(collected) == 8
    assert collected[3:] == [0] * 5  # the first steps compile and allocate
