"""Checkpoints of the trainer in Megatron-LM's format: plain megatron-core loads them, and so does the trainer."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from helpers import dist, megatron_checkpoints, tiny
from helpers.megatron_checkpoints import SETTINGS
from helpers.megatron_jobs import job
from megatron.lm.checkpoint import CheckpointReader
from megatron.lm.checkpoint.foreign.torch_dist import read_common
from megatron.lm.config import Config
from megatron.lm.tools import convert_checkpoint

RUN: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "train_iters": 4, "ckpt_format": "torch_dist"}
TP: dict[str, Any] = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 16}
# Settings of our run, and the case as which plain megatron-core loads it (TP 2, TP 2 and TP 1).
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({"precision": "O2"} | SETTINGS["bf16"], megatron_checkpoints.CASES["bf16"] | {"iteration": 4}),
    "llama": ({"precision": "fp32", **TP} | SETTINGS["llama"], megatron_checkpoints.CASES["llama"] | {"iteration": 4}),
    "gpt2": (
        {"precision": "O3", "use_distributed_optimizer": True} | SETTINGS["gpt2"],
        {"positions": "learned_absolute", "dtype": "bfloat16", "iteration": 4},
    ),
    "squared": ({"precision": "bf16"} | SETTINGS["squared"], megatron_checkpoints.CASES["squared"] | {"dtype": "bfloat16", "iteration": 4}),
    "stretched": (
        {"precision": "O2"} | SETTINGS["stretched"],
        megatron_checkpoints.CASES["stretched"] | {"dtype": "bfloat16", "iteration": 4},
    ),
}
SLOW = ["squared", "stretched"]  # by default plain megatron-core writes them: test_megatron.py of foreign


def settings(prefix: Path | str, folder: Path | str, name: str, **more: Any) -> Config:
    return tiny.config(prefix, **RUN | RUNS[name][0] | {"save": f"{folder}/{name}"} | more)


def train(prefix: str, folder: str, names: list[str]) -> None:
    for name in names:
        tiny.run(settings(prefix, folder, name))


def loaded(prefix: Path, folder: Path, names: list[str]) -> Path:
    """A folder of runs on two processes, by name, which plain megatron-core has loaded."""
    dist.run(train, 2, str(prefix), str(folder), names)
    rates = {"lr": 5e-3, "min_lr": 5e-4}  # as in `tiny.config`: by these too megatron-core 0.19 finds a group of parameters
    job("load", folder, {name: RUNS[name][1] | rates for name in names}, 2)
    return folder


@pytest.fixture(scope="module")
def saved(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loaded(prefix, tmp_path_factory.mktemp("saved"), [name for name in RUNS if name not in SLOW])


@pytest.fixture(scope="module")
def slowly_saved(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loaded(prefix, tmp_path_factory.mktemp("saved"), SLOW)


def held(reader: CheckpointReader) -> Mapping[str, Tensor]:
    return {key: reader.stored.tensor(key) for key in reader.stored.tensors if not key.startswith("step/")}


@pytest.mark.promise(
    "Checkpoints of Megatron-LM", "Plain megatron-core loads every weight, master and moment of `--ckpt-format torch_dist`."
)
@pytest.mark.parametrize(
    ("runs", "name"),
    [pytest.param("slowly_saved", name, marks=pytest.mark.nightly(5)) if name in SLOW else ("saved", name) for name in RUNS],
)
def test_plain_megatron_core_loads_every_tensor(request: pytest.FixtureRequest, runs: str, name: str):
    saved = request.getfixturevalue(runs)
    found, expected = megatron_checkpoints.whole(saved, name, "load"), held(CheckpointReader(saved / name))
    assert found.keys() == expected.keys()
    for key, x in found.items():
        assert torch.equal(x, expected[key]), key


def test_the_trainer_resumes_from_it_as_from_its_own_format(prefix: Path, tmp_path: Path):
    """FP32 keeps every bit; the losses go on as without a stop."""
    flags = RUN | {"precision": "fp32"} | SETTINGS["llama"]
    whole = tiny.losses(tiny.run(tiny.config(prefix, **flags | {"train_iters": 6})))
    tiny.run(tiny.config(prefix, **flags | {"train_iters": 6, "exit_interval": 4, "save": str(tmp_path)}))
    assert {".metadata", "common.pt", "metadata.json", "checkpoint.json"} <= set(os.listdir(tmp_path / "iter_0000004"))
    resumed = tiny.losses(tiny.run(tiny.config(prefix, **flags | {"train_iters": 6, "load": str(tmp_path), "save": str(tmp_path)})))
    assert resumed == whole[4:]


def test_a_run_of_o3_resumes_on_another_grid(saved: Path, prefix: Path):
    """Its weights are stored as their masters in BF16, which agree with the masters beside them."""
    flags = {"save": None, "load": f"{saved}/gpt2", "ckpt_format": "own", "use_distributed_optimizer": False, "train_iters": 6}
    with tiny.trainer(settings(prefix, saved, "gpt2", **flags)) as made:
        assert made.training.iteration == 4
        made.run()


@pytest.mark.parametrize(("precision", "said"), [("collage-plus", "weight_remainder"), ("coat", None)])
def test_states_that_megatron_lacks_are_refused_at_the_start(prefix: Path, tmp_path: Path, precision: str, said: str | None):
    config = tiny.config(prefix, **RUN | {"precision": precision, "save": str(tmp_path)})
    if said is None:  # COAT's moments are dequantized
        tiny.run(config)
        assert held(CheckpointReader(tmp_path))["exp_avg_sq/decoder.final_layernorm.weight"].min() >= 0
        return
    with pytest.raises(ValueError, match=re.escape("--ckpt-format torch_dist supports the states of AdamW")) as caught:
        tiny.run(config)
    assert said in str(caught.value)


LENGTHS: dict[str, dict[str, Any]] = {
    "iterations": {"train_iters": 8, "lr_decay_iters": 6, "lr_warmup_iters": 2},
    "samples": {"train_iters": None, "train_samples": 33, "lr_decay_samples": 30, "lr_warmup_samples": 3},
    "fraction": {"train_iters": 8, "lr_warmup_iters": 0, "lr_warmup_fraction": 0.3},
    "ramp": {"train_iters": None, "train_samples": 40, "rampup_batch_size": [2, 2, 8], "lr_warmup_fraction": 0.1},
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_schedule_is_that_of_megatron_lm_with_the_same_flags(prefix: Path, tmp_path: Path, name: str):
    """megatron-core's schedule, made as Megatron-LM makes it, accepts every value, and so does the trainer."""
    flags = LENGTHS[name] | {
        "exit_interval": 4,
        "precision": "fp32",
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "lr_decay_style": "cosine",
    }
    tiny.run(tiny.config(prefix, **flags, save=str(tmp_path / "own")))
    convert_checkpoint.main(["to-megatron", "--load", str(tmp_path / "own"), "--output", str(tmp_path / "theirs")])
    common = read_common(tmp_path / "theirs" / "iter_0000004")
    config = tiny.config(prefix, **flags)
    optim, consumed = config.optimizer, config.batch_sizes(1).consumed(4)
    batch = 1 if flags["train_iters"] is None else 4
    decay = (flags.get("lr_decay_samples") or flags.get("lr_decay_iters") or flags.get("train_samples") or flags["train_iters"]) * batch
    share = flags.get("lr_warmup_fraction")
    schedule = OptimizerParamScheduler(
        tiny_optimizer(),
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=share * decay if share else (flags.get("lr_warmup_iters") or flags["lr_warmup_samples"]) * batch,
        lr_decay_steps=decay,
        lr_decay_style="cosine",
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=flags.get("train_samples") or 8 * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )
    schedule.load_state_dict(common["opt_param_scheduler"])
    assert schedule.num_steps == consumed == common["args"]["consumed_train_samples"]
    back = {"load": str(tmp_path / "theirs"), "override_opt_param_scheduler": False}
    with tiny.trainer(tiny.config(prefix, **flags | {"exit_interval": None} | back)) as made:
        assert made.training.schedule.get_lr({}) == pytest.approx(schedule.get_lr({}))
        made.run()


def tiny_optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1.0)
