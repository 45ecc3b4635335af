"""A training is state alone: what works on it imports it, and it imports none of them."""

import ast
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import torch

from megatron.lm.training.state import StepResult, Training

LM = Path(__file__).parents[4] / "megatron" / "lm"
# Each may import those before it, and none after it.
ORDER = ("training", "step", "graph", "recorder", "build", "run")


def imported(file: Path) -> set[str]:
    """Which of `ORDER` a file imports anywhere, under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in ORDER if any(f"{path}.".startswith(f"megatron.lm.{name}.") for path in found)}


@pytest.mark.parametrize("name", ORDER)
def test_there_is_no_circle(name: str):
    files = list((LM / name).glob("*.py")) if (LM / name).is_dir() else [LM / f"{name}.py"]
    assert files
    for file in files:
        assert imported(file) <= set(ORDER[: ORDER.index(name) + 1]), file


def test_the_step_knows_neither_graphs_nor_recorder():
    assert imported(LM / "step.py") == {"training"}


def test_a_training_holds_no_graph_and_no_recorder():
    assert not {"graphs", "recorder"} & {field.name for field in fields(Training)}


def test_a_result_does_not_change():
    zero = torch.zeros(())
    result = StepResult(loss_sum=zero, tokens=zero, grad_norm=zero, lr=0.1, skipped=False)
    assert result.loss_scale is None
    with pytest.raises(FrozenInstanceError):
        result.lr = 0.2  # type: ignore[misc]
