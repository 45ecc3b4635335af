"""Data parallelism over NCCL: two GPUs train as one does, and end with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import dist, tiny

RUNS: dict[str, dict[str, Any]] = {
    **{level: {"precision": level} for level in ("fp32", "bf16", "O1", "O2", "O3")},
    "O2 ZeRO": {"precision": "O2", "use_distributed_optimizer": True},
    "O2 nccl": {"precision": "O2", "grad_exchange": "nccl"},
}
# Largest relative difference of a training loss from one GPU's.
LIMITS = {"fp32": 1e-4, "bf16": 1e-2, "O1": 2e-2, "O2": 2e-2, "O3": 2e-2, "O2 ZeRO": 2e-2, "O2 nccl": 2e-2}


Result = tuple[list[float], list[torch.Tensor]]


def train_all(prefix: str, micro_batch_size: int) -> dict[str, Result]:
    """12 steps of a global batch of 8 each, in the same processes: a fresh one takes a minute to import megatron-core on a cold machine."""
    shared = {"global_batch_size": 8, "train_iters": 12, "ddp_bucket_size": 5000}  # several buckets: they overlap
    return {name: tiny.trained(tiny.config(prefix, micro_batch_size=micro_batch_size, **shared, **run)) for name, run in RUNS.items()}


@pytest.mark.multi_gpu
def test_two_gpus_train_as_one_and_zero_changes_no_bit(tmp_path: Path):
    (alone,), (left, right) = dist.side_by_side(
        lambda: dist.on_gpus(train_all, 1, str(tiny.write_data(tmp_path, "one")), 8),
        lambda: dist.on_gpus(train_all, 2, str(tiny.write_data(tmp_path, "two")), 4),
    )
    for name, (losses, weights) in left.items():
        assert losses == pytest.approx(alone[name][0], rel=LIMITS[name]), name
        assert losses[-1] < losses[0] - 0.2, name
        assert tiny.same(weights, right[name][1]), name
    assert left["O2 ZeRO"][0] == left["O2"][0]
    assert tiny.same(left["O2 ZeRO"][1], left["O2"][1])
