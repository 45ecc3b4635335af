"""CUDA graphs of steps on two GPUs: replayed steps with collectives are eager steps bit for bit."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from helpers import dist, tiny

TP = {"tensor_model_parallel_size": 2}
ON_TWO: dict[str, dict[str, Any]] = {
    "O2": {"precision": "O2"},
    "O3": {"precision": "O3"},
    "O3 fp8-sr": {"precision": "O3", "grad_accum_dtype": "fp8-sr"},
    "O3 owner": {"precision": "O3", "grad_accum_on": "owner"},
    "bf16 TP+SP": {"precision": "bf16", **TP, "sequence_parallel": True},
    "O2 TP+SP just in time": {"precision": "O2", "fp8_recipe": "tensorwise", **TP, "sequence_parallel": True},
    "O3 TP+SP": {"precision": "O3", **TP, "sequence_parallel": True, "tp_transport": "nccl"},
    "O3 TP+SP copies": {"precision": "O3", **TP, "sequence_parallel": True, "tp_transport": "copies"},
    "O3 TP+SP gathered, FP8 sums": {"precision": "O3", **TP, "sequence_parallel": True, "tp_saved_input": "gathered", "tp_wire": "fp8"},
}
STEP_ONLY = {"O3 TP+SP copies": "O3 TP+SP"}  # case -> the one whose eager bits it has: a sum of two numbers is rounded once, whoever adds


def two_in_every_mode(prefix: str) -> dict[tuple[str, str], tuple[list[float], list[Tensor]]]:
    """In the same two processes: a fresh one takes a minute to import megatron-core on a cold machine."""
    shared = {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 9}
    modes = {"none": ON_TWO.keys() - STEP_ONLY.keys(), "micro-batch": ("O3", "O3 TP+SP"), "step": ON_TWO.keys()}
    return {
        (name, mode): tiny.trained(tiny.config(prefix, cuda_graph=mode, **shared, **ON_TWO[name]))
        for mode, names in modes.items()
        for name in sorted(names)
    }


@pytest.mark.multi_gpu
def test_graphs_with_collectives_change_no_bit(tmp_path: Path):
    ranks = dist.on_gpus(two_in_every_mode, 2, str(tiny.write_data(tmp_path)))
    for name, mode in ranks[0]:
        eager = STEP_ONLY.get(name, name), "none"
        assert ranks[0][name, mode][0] == ranks[0][eager][0], (name, mode)
        for rank in ranks:
            assert tiny.same(rank[name, mode][1], rank[eager][1]), (name, mode)
        if "TP" not in name:
            assert tiny.same(ranks[0][name, mode][1], ranks[1][name, mode][1]), (name, mode)
