"""Experts on two GPUs over NCCL: they train as on one, and whole steps in CUDA graphs have the bits of eager ones."""

from pathlib import Path
from typing import Any

import pytest

from helpers import dist, tiny
from megatron.lm.config import Config
from megatron.lm.config.rules.check import check

EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 64, "swiglu": True, "disable_bias_linear": True, "hidden_size": 64}
EXPERTS |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 0.1}
EP2 = {"expert_model_parallel_size": 2}
RUNS: dict[str, dict[str, Any]] = {
    f"{level} {graph}": {"opt_level": level, "cuda_graph": graph} for level in ("O0", "O3") for graph in ("none", "step")
} | {"fp32 none": {"precision": "fp32", "cuda_graph": "none"}}
LIMITS = {"fp32": 1e-4, "O0": 1e-2, "O3": 2e-2}


def settings_of(prefix: str, name: str, grid: dict[str, Any], micro_batch_size: int) -> Config:
    shared = {"global_batch_size": 8, "train_iters": 12, "ddp_bucket_size": 5000, "num_layers": 2}
    return tiny.config(prefix, micro_batch_size=micro_batch_size, **shared, **EXPERTS, **RUNS[name], **grid)


def train_all(prefix: str, grid: dict[str, Any], micro_batch_size: int) -> dict[str, Any]:
    return {name: tiny.trained(settings_of(prefix, name, grid, micro_batch_size)) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_the_runs_are_valid(name, tmp_path: Path):
    """The rest requires GPUs, and an invalid flag ended its first run there."""
    prefix = str(tiny.write_data(tmp_path))
    check(settings_of(prefix, name, {}, 2), 1)
    check(settings_of(prefix, name, EP2, 2), 2)


@pytest.mark.multi_gpu
def test_two_gpus_with_half_of_the_experts_train_as_one(tmp_path: Path):
    (alone,), ranks = dist.side_by_side(
        lambda: dist.on_gpus(train_all, 1, str(tiny.write_data(tmp_path, "one")), {}, 2),
        lambda: dist.on_gpus(train_all, 2, str(tiny.write_data(tmp_path, "two")), EP2, 2),
    )
    for name, (losses, _) in ranks[0].items():
        assert losses == pytest.approx(alone[name][0], rel=LIMITS[name.split()[0]]), name
    for rank in ranks:
        for level in ("O0", "O3"):
            (eager, weights), (graphed, same) = rank[f"{level} none"], rank[f"{level} step"]
            assert eager == graphed, level
            assert tiny.same(weights, same), level
