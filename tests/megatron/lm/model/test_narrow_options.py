"""--save-activations coat and --output-layer-precision in whole runs: their loss, resumed runs, recomputation, tensor parallelism."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import dist, tiny
from megatron.lm.config import Config

WIDE = {"save_activations": "compute", "output_layer_precision": "bf16"}
OPTIONS = [("save_activations", "coat"), ("output_layer_precision", "fp8-all"), ("output_layer_precision", "fp8")]
STEPS, LOSS = 18, 0.05  # most by which a training loss of about 2 to 4 may differ over so many steps
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def settings(prefix: Path, level: str = "O2", train_iters: int = STEPS, **changes: Any) -> Config:
    return tiny.config(prefix, opt_level=level, train_iters=train_iters, **WIDE | changes)


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def wide(prefix: Path) -> list[float]:
    return tiny.losses(tiny.run(settings(prefix)))


@pytest.mark.parametrize(("option", "way"), [*OPTIONS[:2], pytest.param(*OPTIONS[2], marks=pytest.mark.nightly(3))])
def test_a_tiny_gpt_trains_to_the_same_loss_and_resumes_bit_for_bit(prefix: Path, tmp_path: Path, wide: list[float], option: str, way: str):
    narrow = tiny.losses(tiny.run(settings(prefix, **{option: way})))
    assert narrow[-1] < narrow[0] - 0.3
    assert 0 < difference(narrow, wide) < LOSS
    run = settings(prefix, save=str(tmp_path), exit_interval=3, **{option: way})
    first = tiny.losses(tiny.run(run))
    resumed = replace(run, training=replace(run.training, exit_interval=6), checkpoint=replace(run.checkpoint, load=str(tmp_path)))
    assert first + tiny.losses(tiny.run(resumed)) == narrow[:6]
    if option == "save_activations":
        assert narrow[0] == wide[0]
        assert tiny.losses(tiny.run(settings(prefix, exit_interval=6, save_activations=way, **FULL))) == narrow[:6]


@pytest.mark.nightly
@pytest.mark.parametrize(("option", "way"), OPTIONS)
@pytest.mark.parametrize("spread", [False, True], ids=["TP", "TP and SP"])
def test_under_tensor_parallelism(gloo_prefix: Path, spread: bool, option: str, way: str):
    alone = tiny.losses(tiny.run(settings(gloo_prefix, "O3", 10, **{option: way})))
    grid = {"tensor_model_parallel_size": 2, "sequence_parallel": spread}
    split = tiny.losses(dist.run(tiny.run, 2, settings(gloo_prefix, "O3", 10, **{option: way}, **grid))[0])
    assert difference(alone, split) < LOSS
