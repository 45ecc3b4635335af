"""CUDA graphs of steps on two GPUs: replayed steps with collectives are eager steps bit for bit."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist, tiny

TP = {"tensor_model_parallel_size": 2}
ON_TWO: dict[str, dict[str, Any]] = {
    "O2": {"precision": "O2"},
    "O3": {"precision": "O3"},
    "O3 fp8-sr": {"precision": "O3", "grad_accum_dtype": "fp8-sr"},
    "O3 owner": {"precision": "O3", "grad_accum_on": "owner"},
    "bf16 TP+SP": {"precision": "bf16", **TP, "sequence_parallel": True},
    "O2 TP+SP": {"precision": "O2", **TP, "sequence_parallel": True},
    "O3 TP+SP": {"precision": "O3", **TP, "sequence_parallel": True, "tp_transport": "nccl"},
    "O3 TP+SP copies": {"precision": "O3", **TP, "sequence_parallel": True, "tp_transport": "copies"},
    "O3 TP+SP gathered, FP8 sums": {"precision": "O3", **TP, "sequence_parallel": True, "tp_saved_input": "gathered", "tp_wire": "fp8"},
    "O3 TP+SP just in time": {"precision": "O3", "fp8_recipe": "tensorwise", **TP, "sequence_parallel": True},
}


def two(prefix: str, mode: str, name: str) -> tuple[list[float], list[Tensor]]:
    settings = tiny.config(prefix, micro_batch_size=2, global_batch_size=8, train_iters=12, cuda_graph=mode, **ON_TWO[name])
    file = Path(f"{prefix}.{mode}.{name.replace(' ', '-')}.jsonl")
    settings = tiny.replace(settings, logging=tiny.replace(settings.logging, metrics_file=str(file)))
    with tiny.trainer(settings) as made:
        made.run()
        weights = tiny.bits(made.training.model.parameters())
        main = torch.distributed.get_rank() == 0
    return tiny.losses(tiny.read(file)) if main else [], weights


def two_in_every_mode(prefix: str) -> dict[tuple[str, str], tuple[list[float], list[Tensor]]]:
    """In the same two processes: a fresh one takes a minute to import megatron-core on a cold machine."""
    modes = ("none", "micro-batch", "step")
    return {(name, mode): two(prefix, mode, name) for name, mode in itertools.product(ON_TWO, modes)}


@pytest.mark.multi_gpu
def test_graphs_with_collectives_change_no_bit(tmp_path: Path):
    prefix = str(tiny.write_data(tmp_path))
    ranks = dist.on_gpus(two_in_every_mode, 2, prefix)
    for (name, mode), (losses, weights) in ranks[0].items():
        assert losses == ranks[0][name, "none"][0], (name, mode)
        assert tiny.same(weights, ranks[0][name, "none"][1]), (name, mode)
        others = ranks[1][name, "none" if "TP" in name else mode]
        assert tiny.same(ranks[1][name, mode][1], others[1]), (name, mode)
        if "TP" not in name:
            assert tiny.same(weights, others[1]), (name, mode)
    for rank in ranks:  # a sum of two numbers is rounded once, whoever adds them up
        assert tiny.same(rank["O3 TP+SP", "none"][1], rank["O3 TP+SP copies", "none"][1])
