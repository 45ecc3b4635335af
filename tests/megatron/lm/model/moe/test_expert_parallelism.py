"""Experts on several processes train as on one: losses, gradient norms, every gradient, the load, and the bytes that are sent."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist, tiny
from megatron.lm.build import build_training
from megatron.lm.data.batch import own_part
from megatron.lm.model.initial import named_globally
from megatron.lm.processes.grid import is_expert
from megatron.lm.run.step_watch import check_replicas
from megatron.lm.step import train_step
from megatron.lm.training.gradients import chunks
from megatron.lm.training.state import Training
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.tensor import ScalingTensor, fp32_values

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several processes on one GPU")

STEPS = {"fp32": 3}  # of the other recipes both phases of delayed scaling
MOE: dict[str, Any] = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "swiglu": True,
    "disable_bias_linear": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_shared_expert_intermediate_size": 16,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": tiny.BOTH_PHASES,
    "num_attention_heads": 4,
    "num_layers": 2,
    "make_vocab_size_divisible_by": 16,
}
EP2 = {"expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
ZERO = {"use_distributed_optimizer": True}
Case = tuple[str, dict[str, Any]]  # recipe, grid
TWO: dict[str, Case] = {
    "fp32 TP": ("fp32", EP2 | TP2),
    "fp32 ZeRO": ("fp32", EP2 | ZERO),
    "fp32 CP": ("fp32", EP2 | CP2),
    "O3 sums in FP8": ("O3", EP2 | {"moe_wire": "fp8-sums"}),
    "O1 recomputed": ("O1", EP2 | {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}),
}
FOUR: dict[str, Case] = {
    "fp32 x DP ZeRO": ("fp32", EP2 | ZERO),
    "fp32 EP 4": ("fp32", {"expert_model_parallel_size": 4}),
    "fp32 x PP": ("fp32", EP2 | PP2),
    "fp32 TP 4": ("fp32", EP2 | TP2 | {"tensor_model_parallel_size": 4}),
    "O2 x DP": ("O2", EP2),
    "O3 TP": ("O3", EP2 | TP2),
    "fp32 CP x DP": ("fp32", EP2 | CP2),
    "fp32 CP x TP, experts whole": ("fp32", CP2 | TP2),
    "O3 CP x PP": ("O3", EP2 | CP2 | PP2),
    "O3 recomputed": ("O3", EP2 | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
}
# Largest relative difference of a loss and a norm from one process's; least SQNR in dB of a gradient in the first step.
LIMITS = {"fp32": (1e-5, 100.0), "O0": (5e-3, 30.0), "O1": (1e-2, 12.0), "O2": (1e-2, 12.0), "O3": (1e-2, 12.0)}


def gradients(training: Training) -> dict[str, list[tuple[int | None, int, Tensor]]]:
    """This rank's averaged gradients by name on one process, each expert's apart: dimension that is cut, first row, values."""
    found: dict[str, list[tuple[int | None, int, Tensor]]] = {}
    sync = training.grad_sync
    for chunk in chunks(training.model):
        for name, module in named_globally(chunk):
            for key, p in module.named_parameters(recurse=False):
                cut = p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
                for row, g in [(segment.row, segment.grad) for segment in sync.owned(p)] if sync.shard else [(0, p.main_grad)]:
                    values = fp32_values(g)
                    if ".experts" in name and not isinstance(p, ScalingTensor):
                        for e, of_expert in enumerate(values, module.first + row):
                            found.setdefault(f"{name}.{key}.{e}", []).append((cut, 0, of_expert))
                    else:
                        found.setdefault(f"{name}.{key}", []).append((cut, row, values))
    return found


def trained(settings: dict[str, Any]) -> dict[str, Any]:
    """What this rank saw of a run."""
    config = tiny.config("corpus", **MOE | settings)
    with tiny.started(config):
        made = build_training(config, tiny.VOCABULARY)
        grid, first = made.grid, None
        own = itertools.islice(tiny.micro_batches(made.config), grid.batch.rank, None, grid.batch.size)
        stream = (own_part(batch, grid.context) for batch in own)
        losses, norms = [], []
        steps = STEPS.get(settings["precision"], tiny.BOTH_PHASES)
        for _ in range(steps):
            made.grad_sync.sent.take()
            result = train_step(made, stream)
            total = torch.stack([result.loss_sum, result.tokens])
            torch.distributed.all_reduce(total)
            losses.append(float(total[0] / total[1]))
            norms.append(float(result.grad_norm))
            first = first or gradients(made)
        check_replicas(made, steps)  # different experts are no faults
        return {
            "losses": losses,
            "norms": norms,
            "gradients": first,
            "load": made.experts.values(),
            "biases": [router.expert_bias for router in made.experts.routers],
            "sent": made.grad_sync.sent.take(),
            "apart": sum(is_expert(p) for p in made.model.parameters()),
            "tensor": (grid.tensor.rank, grid.tensor.size),
        }


def all_runs(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    return {name: trained({"precision": recipe} | grid) for name, (recipe, grid) in cases.items()}


def whole(ranks: list[dict[str, Any]], name: str, like: Tensor) -> Tensor:
    """The gradient of the whole parameter, from all ranks' parts of it."""
    out = torch.full_like(like, float("nan"))
    for rank in ranks:
        for cut, row, values in rank["gradients"].get(name, []):
            place = out
            if cut is not None:
                place = out.chunk(rank["tensor"][1], cut)[rank["tensor"][0]]
            part = place[row : row + len(values)] if values.dim() else place
            assert part.isnan().all() or torch.equal(part, values), f"copies of {name} differ"
            part.copy_(values)
    return out


def compare(name: str, recipe: str, ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    limit, least = LIMITS[recipe]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=limit), name
        assert rank["norms"] == pytest.approx(alone["norms"], rel=3 * limit), name
        assert rank["apart"] < alone["count"]
    for key, [(_, _, want)] in alone["gradients"].items():
        if "linear_fc1" in key or "linear_qkv" in key:  # SwiGLU's and attention's shards are not in one piece
            continue
        got = whole(ranks, key, want)
        assert sqnr_db(want, got) > least, (name, key, sqnr_db(want, got))


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """By recipe."""
    (runs,) = dist.run(all_runs, 1, {recipe: (recipe, {}) for recipe in ("fp32", "O1", "O2", "O3")})
    return {recipe: run | {"count": len(run["gradients"]) + 1} for recipe, run in runs.items()}


@pytest.fixture(scope="module")
def two() -> list[dict[str, dict[str, Any]]]:
    return dist.run(all_runs, 2, TWO)


@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_as_one(name: str, two: list[dict[str, dict[str, Any]]], alone: dict[str, dict[str, Any]]):
    recipe = TWO[name][0]
    compare(name, recipe, [rank[name] for rank in two], alone[recipe])


@pytest.fixture(scope="module")
def four() -> list[dict[str, dict[str, Any]]]:
    return dist.run(all_runs, 4, FOUR, timeout=280)


@pytest.mark.nightly(60)
@pytest.mark.parametrize("name", FOUR)
def test_four_processes_train_as_one(name: str, four: list[dict[str, dict[str, Any]]], alone: dict[str, dict[str, Any]]):
    recipe = FOUR[name][0]
    compare(name, recipe, [rank[name] for rank in four], alone[recipe])
