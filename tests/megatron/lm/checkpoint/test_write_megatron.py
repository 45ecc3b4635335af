"""`convert_checkpoint to-megatron`: plain megatron-core loads what it writes, and the trainer loads it back."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import megatron_checkpoints, tiny
from helpers.megatron_checkpoints import SETTINGS
from helpers.megatron_jobs import job
from megatron.lm.checkpoint import CheckpointReader
from megatron.lm.checkpoint.foreign.torch_dist import TorchDist, read_common
from megatron.lm.tools import convert_checkpoint

RUN: dict[str, Any] = {"micro_batch_size": 4, "train_iters": 4} | SETTINGS["bf16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the data, an O3 run, and its checkpoint converted with and without states."""
    folder = tmp_path_factory.mktemp("to-megatron")
    tiny.run(tiny.config(tiny.write_data(folder), precision="O3", save=f"{folder}/ours", **RUN))
    convert_checkpoint.main(["to-megatron", "--load", f"{folder}/ours", "--output", f"{folder}/bf16"])
    convert_checkpoint.main(["to-megatron", "--load", f"{folder}/ours", "--output", f"{folder}/weights", "--no-optim"])
    return folder


@pytest.mark.nightly(10)  # by default plain megatron-core loads what runs write in this format: test_megatron_content.py
def test_plain_megatron_core_loads_it_at_another_grid(folder: Path):
    job("load", folder, {"bf16": megatron_checkpoints.CASES["bf16"] | {"iteration": 4}}, 2)
    found, saved = megatron_checkpoints.whole(folder, "bf16", "load"), CheckpointReader(folder / "ours")
    assert len(found) == 4 * len(saved.names())
    for name in saved.names():
        assert torch.equal(found[f"model/{name}"], saved.values(name).bfloat16()), name
        assert torch.equal(found[f"master/{name}"], saved.values(name)), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"{key}/{name}"], saved.state(key, name)), (key, name)


def test_it_has_the_values_of_every_weight_master_and_moment(folder: Path):
    """By our own reader of the format."""
    written, saved = folder / "bf16" / "iter_0000004", CheckpointReader(folder / "ours")
    stored = TorchDist(written, read_common(written))
    kinds = {"model": lambda name: saved.values(name).bfloat16(), "master": saved.values}
    kinds |= {key: functools.partial(saved.state, key) for key in ("exp_avg", "exp_avg_sq")}
    for name in saved.names():
        for kind, values in kinds.items():
            assert torch.equal(stored.tensor(f"{kind}/{name}"), values(name)), (kind, name)


def test_the_trainer_loads_it_back(folder: Path):
    flags = RUN | {"train_iters": 6}
    with tiny.trainer(tiny.config(folder / "corpus", precision="O3", load=f"{folder}/bf16", **flags)) as made:
        assert (made.training.iteration, made.training.consumed_samples) == (4, 16)
        made.run()
