"""What is built of a configuration: all parts of a training, which know each other, and refusals before there is a model."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import tiny
from megatron.lm import build
from megatron.lm.build import build_training
from megatron.lm.model.gpt import GPT


def test_what_is_put_around_the_model_is_trained_with_it():
    class Around(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.config, self.extra = model, model.config, nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))

    made: list[Around] = []

    def around(model: nn.Module) -> nn.Module:
        made.append(Around(model))
        return made[0]

    config = tiny.config("corpus", precision="O3")  # whose optimizer is spread
    with tiny.started(config):
        training = build_training(config, tiny.VOCABULARY, around)
        assert isinstance(training.model, GPT)
        assert set(training.grad_sync.params) == set(made[0].parameters())
        assert {p for group in training.optimizer.param_groups for p in group["params"]} == set(made[0].parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU captures graphs")
def test_graphs_that_cannot_be_are_refused_before_there_is_a_model(monkeypatch: pytest.MonkeyPatch):
    def never(*_: object, **__: object) -> nn.Module:
        raise AssertionError("a model was built")

    monkeypatch.setattr(build, "build_model", never)
    config = tiny.config("corpus", cuda_graph="step")
    with tiny.started(config), pytest.raises(ValueError, match="--cuda-graph step: CUDA graphs cannot be captured because there is no GPU"):
        build_training(config, tiny.VOCABULARY)


MOST = 4  # functions outside of `config` and `planning` that read the whole configuration; lower it with each that gets its part


def takes_whole_config(function: ast.FunctionDef) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return any(argument.annotation is not None and ast.unparse(argument.annotation).strip("'\"") == "Config" for argument in arguments)


def test_functions_get_their_part_of_the_configuration():
    root, whole = Path(build.__file__).parent, []
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in ("config", "planning"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            whole += [f"{path.name}: {node.name}" for node in nodes if isinstance(node, ast.FunctionDef) and takes_whole_config(node)]
    assert len(whole) <= MOST, whole
