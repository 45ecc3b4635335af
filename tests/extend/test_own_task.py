"""A PPO task that no source file knows and that is not a sum: write a word backwards."""

import pytest
import torch

from helpers import post_runs
from megatron.lm.post.ppo import rewards
from megatron.lm.post.ppo.rewards import Question, Task

WORDS = ("stone", "river", "cloud", "bread")


def questions(count: int, draw: torch.Generator) -> list[Question]:
    words = [WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=draw).tolist()]
    return [Question([{"role": "user", "content": f"Write {word} backwards."}], word[::-1]) for word in words]


def shared_letters(answer: str, expected: str) -> float:
    """The share of places with the right letter."""
    return sum(a == b for a, b in zip(answer, expected, strict=False)) / max(len(answer), len(expected))


BACKWARDS = Task(questions, shared_letters)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "TASKS", dict(rewards.TASKS))
    rewards.register("backwards", BACKWARDS)


def test_ppo_trains_on_it(tmp_path, monkeypatch):
    ppo = post_runs.example("rlhf/ppo.py")
    monkeypatch.setattr(ppo, "TASKS", rewards.TASKS)  # the module is loaded once for all tests
    post_runs.toy(tmp_path / "toy")
    words = ["--load", str(tmp_path / "toy"), "--save", str(tmp_path / "run"), "--reward", "backwards", "--dtype", "bf16", "--lr", "3e-3"]
    words += ["--train-iters", "2", "--max-new-tokens", "4", "--global-batch-size", "8", "--mini-batch-size", "8", "--opt-level", "O2"]
    assert ppo.main(words) == 0
    found = post_runs.metrics(tmp_path / "run")
    assert len(found) >= 2
    assert all(0 <= row["reward"] <= 1 for row in found if "reward" in row)


def test_a_name_that_is_taken_is_refused():
    rewards.register("backwards", BACKWARDS)  # again, as an import in two modules would
    with pytest.raises(ValueError, match=r"task 'arithmetic' already exists; choose a name other than digits, arithmetic"):
        rewards.register("arithmetic", BACKWARDS)
