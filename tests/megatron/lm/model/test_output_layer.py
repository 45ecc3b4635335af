"""--output-layer-precision fp8 and fp8-all in whole runs: the loss they cost, on one process and under tensor parallelism, and resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import dist, tiny
from megatron.lm.config import Config

NARROW = ("fp8", "fp8-all")
LOSS = 0.05  # most by which a training loss of about 2 to 4 may differ over 30 steps


def settings(folder: Path, level: str = "O2", **changes: Any) -> Config:
    return tiny.config(tiny.write_data(folder) if not (folder / "corpus.bin").exists() else folder / "corpus", opt_level=level, **changes)


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the LM head in BF16."""
    return tiny.losses(tiny.run(settings(tmp_path_factory.mktemp("wide"), train_iters=18, output_layer_precision="bf16")))


@pytest.mark.parametrize("way", [pytest.param("fp8", marks=pytest.mark.nightly(3)), "fp8-all"])
def test_a_tiny_gpt_trains_to_the_same_loss_and_resumes_bit_for_bit(tmp_path: Path, wide: list[float], way: str):
    narrow = tiny.losses(tiny.run(settings(tmp_path, train_iters=18, output_layer_precision=way)))
    assert narrow[-1] < narrow[0] - 0.3
    assert 0 < difference(narrow, wide) < LOSS
    run = settings(tmp_path, train_iters=18, output_layer_precision=way, save=str(tmp_path / "saved"), exit_interval=3)
    first = tiny.losses(tiny.run(run))
    resumed = replace(
        run, training=replace(run.training, exit_interval=6), checkpoint=replace(run.checkpoint, load=str(tmp_path / "saved"))
    )
    assert first + tiny.losses(tiny.run(resumed)) == narrow[:6]


@pytest.mark.nightly
@pytest.mark.parametrize("way", NARROW)
@pytest.mark.parametrize("spread", [False, True], ids=["TP", "TP and SP"])
def test_under_tensor_parallelism(tmp_path: Path, spread: bool, way: str):
    alone = tiny.losses(tiny.run(settings(tmp_path, "O3", train_iters=10, output_layer_precision=way)))
    grid = {"tensor_model_parallel_size": 2, "sequence_parallel": spread}
    split = tiny.losses(dist.run(tiny.run, 2, settings(tmp_path, "O3", train_iters=10, output_layer_precision=way, **grid))[0])
    assert difference(alone, split) < LOSS
