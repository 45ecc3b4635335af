"""A step that one rank's gradient spoils is in no rank's histories: tensor, pipeline and data parallelism, and ZeRO."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist, tiny
from megatron.lm.build import build_training
from megatron.lm.data.batch import own_part
from megatron.lm.processes import process_groups
from megatron.lm.step import train_step
from megatron.lm.training.gradients import chunks

BAD, STEPS = tiny.WINDOW + 1, tiny.WINDOW + 4
SHARED: dict[str, Any] = {"num_layers": 2, "num_attention_heads": 4, "micro_batch_size": 2, "lr_warmup_iters": 0, "train_iters": 20}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 24, "swiglu": True, "disable_bias_linear": True}
EXPERTS |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
GRIDS: dict[str, dict[str, Any]] = {
    "O3, ZeRO": {"precision": "O3", "use_distributed_optimizer": True, "global_batch_size": 4},
    "O2, TP with FP8 sums": {"precision": "O2", "tensor_model_parallel_size": 2, "sequence_parallel": True, "global_batch_size": 4},
    "O2, PP": {"precision": "O2", "pipeline_model_parallel_size": 2, "global_batch_size": 4},
    "O3, TP x PP": {"precision": "O3", "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "global_batch_size": 4},
    "O2, DP with mu": {"precision": "O2", "grad_exchange": "nccl", "grad_scaling": "auto", "global_batch_size": 8},
    "O1, DP": {"precision": "O1", "global_batch_size": 4},
    "O3, CP with FP8 attention": {
        "precision": "O3",
        "context_parallel_size": 2,
        "attention_precision": "fp8",
        "kv_channels": 16,
        "global_batch_size": 2,
    },
    "O3, experts": {"precision": "O3", "expert_model_parallel_size": 2, "global_batch_size": 4, **EXPERTS},
    "fp32, experts": {"precision": "fp32", "expert_model_parallel_size": 2, "global_batch_size": 4, **EXPERTS},
}


def poison(g: Tensor) -> Tensor:
    return torch.full_like(g, float("nan"))


def run(settings: dict[str, Any], struck: bool) -> tuple[list[Tensor], list[Any], int]:
    """The bits of weights, histories and states that this rank ends with, mu, and the skipped steps; one batch is left out unless
    `struck`."""
    config = tiny.config("corpus", **SHARED, **settings)
    with tiny.started(config):
        process_groups.seed_all(config.training.seed)
        made = build_training(config, tiny.VOCABULARY)
        stream = (own_part(batch, made.grid.context) for batch in tiny.micro_batches(config))
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        for step in range(STEPS):
            batches = [next(stream) for _ in range(made.micro_batches)]
            if step == BAD and not struck:
                continue
            mlp = chunks(made.model)[-1].decoder.layers[-1].mlp
            # Of an expert, which only this rank has.
            struck_one = next(mlp.experts.parameters()) if hasattr(mlp, "experts") else mlp.linear_fc1.bias
            hooks = [struck_one.register_hook(poison)] if step == BAD and last else []
            made.grad_sync.statistics.watch(False)
            train_step(made, iter(batches))
            for hook in hooks:
                hook.remove()
        made.optimizer.wait()
        tensors = [t for t in made.model.state_dict().values() if isinstance(t, Tensor)]
        tensors += [t for state in made.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        mu = [] if made.grad_sync.autoscale is None else made.grad_sync.autoscale.mu.tolist()
        return tiny.bits(tensors), mu, made.optimizer.skipped_steps


def on_ranks(names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        (struck, mu, skipped), (clean, clean_mu, none) = run(GRIDS[name], True), run(GRIDS[name], False)
        found[name] = tiny.same(struck, clean), mu == clean_mu, skipped, none
    return found


FEW, FOUR = ["O3, ZeRO", "O2, TP with FP8 sums", "O3, experts"], ["O3, TP x PP"]
SLOW = [([name for name in GRIDS if name not in FEW + FOUR], 2), (FOUR, 4)]


@pytest.mark.parametrize(("names", "ranks"), [(FEW, 2), *(pytest.param(*case, marks=pytest.mark.nightly(20)) for case in SLOW)], ids=str)
def test_a_step_that_one_rank_spoils_leaves_no_trace_on_any(names: list[str], ranks: int):
    for found in dist.run(on_ranks, ranks, names):
        assert found == dict.fromkeys(names, (True, True, 1, 0))
