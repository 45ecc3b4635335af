"""--save-activations coat in whole runs: the loss it costs, resumed runs, full recomputation, tensor parallelism."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import dist, tiny
from megatron.lm.config import Config

# Most by which a training loss of about 2 to 4 may differ over 30 steps.
LOSS = 0.05


def settings(folder: Path, level: str = "O2", **changes: Any) -> Config:
    return tiny.config(tiny.write_data(folder) if not (folder / "corpus.bin").exists() else folder / "corpus", opt_level=level, **changes)


def difference(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_a_tiny_gpt_trains_to_the_same_loss(tmp_path: Path):
    kept, plain = (tiny.losses(tiny.run(settings(tmp_path, train_iters=30, save_activations=way))) for way in ("coat", "compute"))
    assert kept[0] == plain[0]
    assert kept[-1] < kept[0] - 0.3
    assert 0 < difference(kept, plain) < LOSS


def test_resumes_bit_for_bit_and_full_recomputation_changes_no_bit(tmp_path: Path):
    whole = tiny.losses(tiny.run(settings(tmp_path, train_iters=6, save_activations="coat")))
    run = settings(tmp_path, train_iters=6, save_activations="coat", save=str(tmp_path / "saved"), exit_interval=3)
    first = tiny.losses(tiny.run(run))
    resumed = replace(
        run, training=replace(run.training, exit_interval=None), checkpoint=replace(run.checkpoint, load=str(tmp_path / "saved"))
    )
    assert first + tiny.losses(tiny.run(resumed)) == whole
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert tiny.losses(tiny.run(settings(tmp_path, train_iters=6, save_activations="coat", **full))) == whole


@pytest.mark.nightly
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_under_tensor_and_sequence_parallelism(tmp_path: Path, level: str):
    grid = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    kept, plain = (
        tiny.losses(dist.run(tiny.run, 2, settings(tmp_path, level, train_iters=10, save_activations=way, **grid))[0])
        for way in ("coat", "compute")
    )
    assert difference(kept, plain) < LOSS
