"""Resuming on GPUs: bit for bit, with CUDA graphs and checkpoints written in the background; over NCCL, onto another grid."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from helpers import dist, tiny
from megatron.lm.config import Config
from msamp.numerics import recipe

Result = tuple[list[float], list[Tensor]]
SHARED = {"train_iters": 30, "micro_batch_size": 2, "global_batch_size": 4}
MORE: dict[str, dict[str, Any]] = {
    "fp16-amp": {"initial_loss_scale": 2.0**20, "loss_scale_window": 3},
    "bf16+coat": {"optimizer_state": "coat"},
    "O3+coat": {"optimizer_state": "coat"},
    "O3+muon": {"optimizer": "muon"},
    "bf16+sgd": {"optimizer": "sgd"},
    "O3+published": {"as_published": "fp8-lm", "grad_exchange": "nccl", "mu_rule": "paper"},
    "collage-plus+published": {"as_published": "collage"},
    "coat+published": {"as_published": "coat"},
}


def trained(settings: Config) -> Result:
    """Losses (on rank 0), and the bits of weights, states and scales that the run ends with."""
    rows: list[dict[str, Any]] = []
    with tiny.trainer(settings) as made:
        made.metrics.write = rows.append  # type: ignore[method-assign]
        made.run()
        optimizer = made.training.optimizer
        states = [value for holding in optimizer.holdings() for _, value in sorted(optimizer.state[holding.weight].items())]
        kept = [value for key, value in made.training.model.state_dict().items() if not key.endswith("_extra_state")]
        return tiny.losses(rows), tiny.bits(kept + states)


def straight_and_resumed(prefix: str, folder: str, **settings: Any) -> tuple[Result, Result, Result]:
    """30 steps; 24 steps, the last of them replayed graphs, and a save; the remaining ones."""
    straight = trained(tiny.config(prefix, **SHARED, **settings))
    before = trained(tiny.config(prefix, exit_interval=24, save=folder, async_save=True, **SHARED, **settings))
    return straight, before, trained(tiny.config(prefix, load=folder, save=folder, async_save=True, **SHARED, **settings))


@pytest.mark.gpu
@pytest.mark.parametrize("level", dict.fromkeys((*recipe.names(), *MORE)))
def test_resume_on_a_gpu_is_bit_exact(prefix: Path, tmp_path: Path, level: str):
    more = MORE.get(level, {})
    straight, before, after = straight_and_resumed(str(prefix), str(tmp_path), precision=level.split("+")[0], **more)
    assert before[0] + after[0] == straight[0]
    assert tiny.same(after[1], straight[1])


def on_two(prefix: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        level: straight_and_resumed(prefix, f"{folder}/{level}", precision=level) for level in ("fp16-amp", "bf16", "O2", "O3")
    }
    more = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 32}
    moved = tiny.config(prefix, precision="O3", tensor_model_parallel_size=2, sequence_parallel=True, load=f"{folder}/O3", **more)
    stayed = tiny.config(prefix, precision="O3", load=f"{folder}/O3", **more)
    return found | {"moved": trained(moved)[0], "stayed": trained(stayed)[0]}


@pytest.mark.multi_gpu
def test_two_gpus_resume_bit_for_bit_and_move_to_tensor_parallelism(tmp_path: Path):
    prefix = str(tiny.write_data(tmp_path))
    left, right = dist.on_gpus(on_two, 2, prefix, str(tmp_path / "saved"))
    for level in ("fp16-amp", "bf16", "O2", "O3"):
        straight, before, after = left[level]
        assert before[0] + after[0] == straight[0], level
        for rank in (left, right):
            assert tiny.same(rank[level][2][1], rank[level][0][1]), level
    assert len(left["moved"]) == 2
    assert left["moved"] == pytest.approx(left["stayed"], rel=0.01)
