"""A training is state alone: what works on it imports it, and it imports none of them."""

import ast
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import torch

from megatron.lm.training.state import StepResult, Training

LM = Path(__file__).parents[4] / "megatron" / "lm"


def test_the_step_imports_neither_graphs_nor_what_a_run_reports():
    """Not under TYPE_CHECKING either; import-linter checks the rooms' order (`make lint`)."""
    modules = {
        node.module or "" for node in ast.walk(ast.parse((LM / "step.py").read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
    }
    assert "megatron.lm.training.state" in modules
    assert not [module for module in modules if module.startswith(("megatron.lm.graphs", "megatron.lm.run"))]


def test_a_training_holds_no_graph_and_no_recorder():
    assert not {"graphs", "recorder"} & {field.name for field in fields(Training)}


def test_a_result_does_not_change():
    zero = torch.zeros(())
    result = StepResult(loss_sum=zero, tokens=zero, grad_norm=zero, lr=0.1, skipped=False)
    assert result.loss_scale is None
    with pytest.raises(FrozenInstanceError):
        result.lr = 0.2  # type: ignore[misc]
