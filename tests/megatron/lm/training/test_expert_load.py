"""The load of experts over a step: what counts, the expert bias, and losses whose gradient is that of one micro-batch in any number."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist, replayed, tiny
from megatron.lm.build import build_training
from megatron.lm.graphs.step_graph import StepGraphs
from megatron.lm.model.moe.router import scale_losses
from megatron.lm.processes import process_groups
from megatron.lm.step import evaluate, train_step
from megatron.lm.training.state import Batches, Training

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "swiglu": True,
    "disable_bias_linear": True,
    "precision": "fp32",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def training(**settings: Any) -> Training:
    config = tiny.config("corpus", **EXPERTS | settings)
    process_groups.seed_all(config.training.seed)
    return build_training(config, tiny.VOCABULARY)


def gradients(made: Training, batches: Batches) -> list[Tensor]:
    """The averaged gradients of the next step, which is then taken."""
    seen: list[Tensor] = []

    class Watch:
        def before_update(self) -> None:
            seen.extend(holding.grad.clone() for holding in made.optimizer.ready())

    train_step(made, batches, recorder=Watch())
    return seen


@pytest.mark.usefixtures("one_process")
def test_every_token_counts_once_also_when_layers_are_recomputed_and_an_evaluation_counts_none():
    loads = []
    for settings in ({}, FULL, {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}):
        made = training(**settings, global_batch_size=8)
        train_step(made, tiny.micro_batches(made.config))
        loads.append(made.experts._counts.clone())
        assert torch.equal(loads[-1].sum(1), torch.full((2,), 2 * 8 * 16.0).double())  # top 2 of 8 sequences of 16 tokens
        evaluate(made, tiny.micro_batches(made.config), 1)
        assert not any(router.tokens_per_expert.any() or router.sums.any() for router in made.experts.routers)
    assert torch.equal(loads[0], loads[1])
    assert torch.equal(loads[0], loads[2])


@pytest.mark.usefixtures("one_process")
def test_the_bias_moves_against_the_load_and_not_on_a_skipped_step():
    made = training(moe_router_bias_update_rate=0.25)
    train_step(made, tiny.micro_batches(made.config))
    wanted = 0.25 * torch.sign(made.experts._counts.mean(1, keepdim=True) - made.experts._counts)
    biases = [router.expert_bias.clone() for router in made.experts.routers]
    assert torch.equal(torch.stack(biases), wanted.float())
    result = train_step(made, tiny.micro_batches(made.config, bad=0))
    assert bool(result.skipped)
    assert all(torch.equal(router.expert_bias, bias) for router, bias in zip(made.experts.routers, biases, strict=True))
    assert made.experts._counts.sum() > 0  # but its load is known


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("micro_batches", "precision"), [(1, "fp32"), (2, "fp32"), pytest.param(2, "O3", marks=pytest.mark.nightly(4))])
def test_graphs_have_the_gradients_of_eager_steps(micro_batches: int, precision: str):
    settings = {"global_batch_size": 4 * micro_batches, "precision": precision}
    eager, graphed = training(**settings), training(**settings)
    streams = [tiny.micro_batches(made.config) for made in (eager, graphed)]
    made_by_graphs: list[list[Tensor]] = []
    with replayed.on_a_cpu():
        graphs = StepGraphs(graphed, "micro-batch")
        for _ in range(6 if precision == "fp32" else tiny.BOTH_PHASES + 3):
            wanted = gradients(eager, streams[0])
            scale_losses(16)  # as another schedule of this process leaves it
            seen: list[Tensor] = []

            class Watch:
                def before_update(self, seen: list[Tensor] = seen) -> None:
                    seen.extend(holding.grad.clone() for holding in graphed.optimizer.ready())

            train_step(graphed, streams[1], graphs, recorder=Watch())
            made_by_graphs.append(seen)
            equal = tiny.same(tiny.bits(wanted), tiny.bits(seen))  # not in the assertion, which would print them
            assert equal
    assert graphs.captured


def ranked(settings: dict[str, Any]) -> tuple[dict[str, float], list[Tensor]]:
    """The log's numbers after two steps over 8 sequences, with the gradient norms, and the biases of this rank."""
    with tiny.started(tiny.config("corpus", **EXPERTS | settings)):
        made = training(**settings, global_batch_size=8)
        rank, size = made.grid.batch.rank, made.grid.batch.size
        stream = itertools.islice(tiny.micro_batches(made.config), rank, None, size)
        norms = {f"norm of step {step}": float(train_step(made, stream).grad_norm) for step in range(2)}
        return made.experts.values() | norms, [router.expert_bias for router in made.experts.routers]


GRIDS = {
    "data": ({"micro_batch_size": 4}, 2),
    "zero": ({"use_distributed_optimizer": True}, 2),
    "stages": ({"pipeline_model_parallel_size": 2}, 2),
    "sequence": ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}, 2),
    "tensor": ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 2),
}


@pytest.mark.parametrize(
    "name", ["sequence", *(pytest.param(name, marks=pytest.mark.nightly(5)) for name in ("data", "zero", "stages", "tensor"))]
)
def test_the_load_losses_and_biases_are_those_of_one_process(name: str):
    settings, processes = GRIDS[name]
    alone, biases = dist.run(ranked, 1, {}, init=False)[0]
    results = dist.run(ranked, processes, settings, init=False)
    for values, _ in results:
        assert values == pytest.approx(alone, rel=1e-4)
    there = [bias for _, own in (results if name == "stages" else results[:1]) for bias in own]
    assert all(torch.equal(one, other) for one, other in zip(biases, there, strict=True))
