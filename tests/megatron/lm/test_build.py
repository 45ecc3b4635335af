"""What is built of a configuration: all parts of a training, which know each other, and refusals before there is a model."""

import pytest
import torch
from torch import nn

from helpers import tiny
from megatron.lm import build
from megatron.lm.build import build_training
from megatron.lm.graphs.step_graph import build as build_graphs
from megatron.lm.model.gpt import GPT
from megatron.lm.processes.grid import Grid


def test_the_parts_of_a_training_know_each_other():
    config = tiny.config("corpus", precision="fp16-amp", micro_batch_size=2, global_batch_size=6)
    with tiny.started(config):
        made = build_training(config, tiny.VOCABULARY)
        assert isinstance(made.model, GPT)
        assert made.grid == Grid.current()
        assert (made.iteration, made.consumed_samples, made.passed_over) == (0, 0, 0)
        assert (made.micro_batches, made.vocab_size) == (3, tiny.VOCABULARY)
        assert set(made.grad_sync.params) == set(made.model.parameters())
        assert made.schedule.optimizer is made.optimizer
        assert made.loss_scaler is not None
        assert made.model.config.grad_scale_func == made.loss_scaler.multiply
        if not torch.cuda.is_available():
            assert build_graphs(made) is None


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


def test_without_fp16_there_is_no_loss_scale_and_fp8_layers_have_histories():
    config = tiny.config("corpus", precision="O2")
    with tiny.started(config):
        made = build_training(config, tiny.VOCABULARY)
        assert made.loss_scaler is None
        assert len(made.scaling.layers) == 4 * config.model.num_layers
        assert (made.linears.bf16, made.config.precision.bf16_linears) == ((), ())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU captures graphs")
def test_graphs_that_cannot_be_are_refused_before_there_is_a_model(monkeypatch: pytest.MonkeyPatch):
    def never(*_: object, **__: object) -> nn.Module:
        raise AssertionError("a model was built")

    monkeypatch.setattr(build, "build_model", never)
    config = tiny.config("corpus", cuda_graph="step")
    with tiny.started(config), pytest.raises(ValueError, match="--cuda-graph step: CUDA graphs cannot be captured because there is no GPU"):
        build_training(config, tiny.VOCABULARY)
