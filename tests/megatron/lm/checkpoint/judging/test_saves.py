"""What a save finds in itself on two ranks; values of every kind are in tests/attack/test_unloadable_saves.py."""

from pathlib import Path
from typing import Any

import pytest

from helpers import dist, tiny
from megatron.lm.checkpoint import content
from megatron.lm.checkpoint.judging.saves import problems


def _on_two(prefix: str, level: str) -> list[list[str]]:
    """What is found while all is sound, and with an impossible step on the rank that has it."""
    with tiny.trainer(tiny.config(prefix, precision=level, train_iters=2)) as made:
        made.run()
        training = made.training
        items = content.items(training)
        found = [problems(training, items, content.info(training))]
        step = next((item.tensor for item in items if item.key == "step/decoder.final_layernorm.weight"), None)
        if step is not None:
            step.fill_(-2.0)
        found.append(problems(training, items, content.info(training)))
        return found


@pytest.mark.parametrize("level", ["O3", pytest.param("coat", marks=pytest.mark.nightly(30))])
def test_a_problem_of_one_rank_is_known_to_all(gloo_prefix: Path, level: str):
    ranks: list[Any] = dist.run(_on_two, 2, str(gloo_prefix), level)
    words = "step/decoder.final_layernorm.weight is -2.0; it must be one torch.float32 in [0, 2] without a fraction"
    assert ranks == [[[], [words]]] * 2
