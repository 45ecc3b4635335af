"""Data parallelism over NCCL: two GPUs train as one does, and end with the same bits."""

from pathlib import Path

import dist
import pytest
import tiny
import torch

LIMITS = {"fp32": 1e-4, "bf16": 1e-2, "O1": 2e-2, "O2": 2e-2}  # largest relative difference of a training loss from one GPU's


def train(prefix: str, level: str, micro_batch_size: int) -> tuple[str, list[float], list[torch.Tensor]]:
    """Backend, losses (on rank 0) and the bits of all weights after 12 steps of a global batch of 8."""
    settings = tiny.config(prefix, precision=level, micro_batch_size=micro_batch_size, global_batch_size=8, train_iters=12)
    settings = tiny.replace(settings, logging=tiny.replace(settings.logging, metrics_file=f"{prefix}.{level}.{micro_batch_size}.jsonl"))
    with tiny.trainer(settings) as made:
        backend = torch.distributed.get_backend()
        made.run()
        weights = tiny.bits(made.training.model.parameters())
        main = torch.distributed.get_rank() == 0
    return backend, tiny.losses(tiny.read(Path(settings.logging.metrics_file))) if main else [], weights


@pytest.mark.multi_gpu
@pytest.mark.parametrize("level", LIMITS)
def test_two_gpus_train_as_one(level: str, tmp_path: Path):
    prefix = str(tiny.write_data(tmp_path))
    ((_, alone, _),) = dist.run(train, 1, prefix, level, 8, init=False)
    (backend, losses, left), (_, _, right) = dist.run(train, 2, prefix, level, 4, init=False)
    assert backend == ("nccl" if torch.cuda.is_available() else "gloo")
    assert losses == pytest.approx(alone, rel=LIMITS[level])
    assert losses[-1] < losses[0] - 0.2
    assert tiny.same(left, right)
