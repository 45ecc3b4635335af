"""What is built of a configuration: all parts of a training, which know each other, and refusals before there is a model."""

import ast
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import golden_losses, tiny
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


MOST = 3  # functions outside of `config` and `planning` that read the whole configuration; lower it with each that gets its part


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


# Four 200-step trainings end where they ended before, within the spread of the seeds.


COMMITTED = json.loads(golden_losses.FILE.read_text(encoding="utf-8"))


@pytest.mark.promise("Recipes", "The losses of four 200-step training runs stay within the spread of their seeds.")
@pytest.mark.nightly(110)
def test_no_loss_moved_beyond_the_spread_of_the_seeds(tmp_path: Path) -> None:
    prefix = tiny.write_data(tmp_path)
    losses = {name: golden_losses.loss(name, golden_losses.GOLDEN_SEED, prefix) for name in golden_losses.PRECISIONS}
    assert golden_losses.moved(losses, COMMITTED) == []


@pytest.mark.nightly(20)
def test_a_changed_learning_rate_moves_one(tmp_path: Path) -> None:
    loss = golden_losses.loss("O0", golden_losses.GOLDEN_SEED, tiny.write_data(tmp_path), lr=2.5e-3, min_lr=2.5e-4)
    assert len(golden_losses.moved({"O0": loss}, COMMITTED)) == 1
