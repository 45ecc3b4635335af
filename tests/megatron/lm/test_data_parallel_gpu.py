"""Data parallelism over NCCL: two GPUs train as one does, and end with the same bits."""

from pathlib import Path
from typing import Any

import dist
import pytest
import tiny
import torch

RUNS: dict[str, dict[str, Any]] = {
    **{level: {"precision": level} for level in ("fp32", "bf16", "O1", "O2", "O3")},
    "O2 ZeRO": {"precision": "O2", "use_distributed_optimizer": True},
    "O2 nccl": {"precision": "O2", "grad_exchange": "nccl"},
}
# Largest relative difference of a training loss from one GPU's.
LIMITS = {"fp32": 1e-4, "bf16": 1e-2, "O1": 2e-2, "O2": 2e-2, "O3": 2e-2, "O2 ZeRO": 2e-2, "O2 nccl": 2e-2}


def train(prefix: str, name: str, micro_batch_size: int) -> tuple[str, list[float], list[torch.Tensor]]:
    """Backend, losses (on rank 0) and the bits of all weights after 12 steps of a global batch of 8."""
    shared = {"global_batch_size": 8, "train_iters": 12, "ddp_bucket_size": 5000}  # several buckets: they overlap
    settings = tiny.config(prefix, micro_batch_size=micro_batch_size, **shared, **RUNS[name])
    settings = tiny.replace(settings, logging=tiny.replace(settings.logging, metrics_file=f"{prefix}.{name}.{micro_batch_size}.jsonl"))
    with tiny.trainer(settings) as made:
        backend = torch.distributed.get_backend()
        made.run()
        weights = tiny.bits(made.training.model.parameters())
        main = torch.distributed.get_rank() == 0
    return backend, tiny.losses(tiny.read(Path(settings.logging.metrics_file))) if main else [], weights


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", RUNS)
def test_two_gpus_train_as_one(name: str, tmp_path: Path):
    prefix = str(tiny.write_data(tmp_path))
    ((_, alone, _),) = dist.run(train, 1, prefix, name, 8, init=False)
    (backend, losses, left), (_, _, right) = dist.run(train, 2, prefix, name, 4, init=False)
    assert backend == ("nccl" if torch.cuda.is_available() else "gloo")
    assert losses == pytest.approx(alone, rel=LIMITS[name])
    assert losses[-1] < losses[0] - 0.2
    assert tiny.same(left, right)


@pytest.mark.multi_gpu
def test_zero_changes_no_bit_on_two_gpus(tmp_path: Path):
    prefix = str(tiny.write_data(tmp_path))
    (_, plain, left), _ = dist.run(train, 2, prefix, "O2", 4, init=False)
    (_, zero, right), _ = dist.run(train, 2, prefix, "O2 ZeRO", 4, init=False)
    assert zero == plain
    assert tiny.same(left, right)
