"""Resuming: bit for bit at every level, what may change meanwhile, what is refused, and what is taken where only a part is wanted.

Other grids and other levels are tested in test_resharding.py and test_levels.py, damage in test_damage.py.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import checkpoints, dist, tiny
from helpers.checkpoints import LEVELS, contents, everything, pointed, resume, tensors, trained
from megatron.lm.checkpoint import latest, load, save
from megatron.lm.config import Config
from megatron.lm.training.state import Training
from msamp.numerics.tensor import ScalingTensor

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.fixture(scope="module")
def good(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of iteration 4 of an O2 run; copy it before changing anything."""
    return checkpoints.saved(prefix, tmp_path_factory.mktemp("good"), opt_level="O2")


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


# Bit for bit


def check_resume(prefix: Path, folder: Path, first: int, **settings: Any) -> None:
    """All steps at once are `first` steps, a save, a load and the others: losses and every bit."""
    straight, bits = trained(tiny.config(prefix, **settings))
    before, _ = trained(tiny.config(prefix, exit_interval=first, save=str(folder), **settings))
    after, bits_after = trained(tiny.config(prefix, load=str(folder), **settings))
    assert (len(before), len(after)) == (first, settings["train_iters"] - first)
    assert before + after == straight
    assert tiny.same(bits, bits_after)


@pytest.mark.parametrize("level", [level if level == "O2" else pytest.param(level, marks=pytest.mark.nightly) for level in LEVELS])
def test_resume_is_bit_exact_when_the_window_fills_and_with_dropout(prefix: Path, tmp_path: Path, level: str):
    first, last = (3, 6) if level in ("fp32", "bf16") else (tiny.WINDOW - 2, tiny.WINDOW + 2)  # these have no window
    check_resume(prefix, tmp_path, first, train_iters=last, precision=level, **DROPOUT)


@pytest.mark.nightly
@pytest.mark.parametrize("level", LEVELS)
def test_resume_is_bit_exact_while_casts_are_just_in_time(prefix: Path, tmp_path: Path, level: str):
    check_resume(prefix, tmp_path, 6, train_iters=12, precision=level, micro_batch_size=2, global_batch_size=4)


def test_resume_is_bit_exact_in_other_formats(prefix: Path, tmp_path: Path):
    flags = {"fp8_recipe": "tensorwise", "master_format": "bf16", "exp_avg_sq_format": "fp8-e4m3"}
    check_resume(prefix, tmp_path, 2, train_iters=4, opt_level="O2", **flags)


# What the default launch of two ranks (test_saving.py) leaves out.
SHARED: dict[str, Any] = {"train_iters": 12, "global_batch_size": 8, "micro_batch_size": 4, "ddp_bucket_size": 5000}
RUNS: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O2 ZeRO": {"opt_level": "O2", "use_distributed_optimizer": True},
    "O3 fp8-sr": {"opt_level": "O3", "grad_accum_dtype": "fp8-sr", "micro_batch_size": 2},
    "O3 TP and SP, dropout": {
        "opt_level": "O3",
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "micro_batch_size": 8,
        "num_attention_heads": 4,
        **DROPOUT,
    },
}


def resumed(prefix: str, folder: str) -> dict[str, list[tuple[list[float], list[Tensor]]]]:
    """Every run undisturbed, its first half, and its second half from a checkpoint."""
    return {
        name: [
            trained(tiny.config(prefix, **SHARED | flags)),
            trained(tiny.config(prefix, **SHARED | flags, exit_interval=6, save=f"{folder}/{name}")),
            trained(tiny.config(prefix, **SHARED | flags, load=f"{folder}/{name}")),
        ]
        for name, flags in RUNS.items()
    }


@pytest.mark.nightly
def test_two_ranks_resume_bit_for_bit(gloo_prefix: Path, tmp_path: Path):
    for rank in dist.run(resumed, 2, str(gloo_prefix), str(tmp_path), timeout=800):
        for name in RUNS:
            (losses, bits), (before, _), (after, resumed_bits) = rank[name]
            assert before + after == losses, name
            assert tiny.same(bits, resumed_bits), name


# Where it goes on


# Another model


def untouched(config: Config, folder: Path, said: str) -> None:
    """Loading raises a ValueError that matches `said`, and neither the training state nor the folder has changed."""
    files = contents(folder)
    with tiny.trainer(config) as made:
        before = everything(made)
        made.training.config = pointed(config, load=str(folder))
        with pytest.raises(ValueError, match=said):
            load(made.training)
        assert tiny.same(before, everything(made))
    assert contents(folder) == files


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_layers": 3}, r"--num-layers 3 \(saved: 2\).*Use the saved values"),
        ({"hidden_size": 64}, r"--hidden-size 64 \(saved: 32\)"),
        ({"swiglu": True, "position_embedding_type": "learned_absolute"}, r"--swiglu True \(saved: False\); .*learned_absolute"),
        ({"untie_embeddings_and_output_weights": True}, "--untie-embeddings-and-output-weights True"),
        ({"vocab_size": 64}, r"--vocab-size 64 \(saved: 60\); a tokenizer of 64 tokens \(saved: 60\)"),
        ({"global_batch_size": 8}, r"--global-batch-size 8 \(saved: 4\)"),
        ({"train_iters": 1}, r"1 iterations by --train-iters or --train-samples \(saved: 4 are done; give more\)"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_model(prefix: Path, good: Path, settings: dict[str, Any], said: str):
    untouched(tiny.config(prefix, opt_level="O2", **settings), good, f"does not match: .*{said}")


# Parts of a checkpoint


def fresh(training: Training) -> bool:
    """Whether no step has gone into the optimizer, and every master is its weight to the weight's own precision."""
    for p, state in training.optimizer.state.items():
        weight = p.dequantize(torch.float32) if isinstance(p, ScalingTensor) else p.float()
        for key, value in state.items():
            values = value.dequantize(torch.float32) if isinstance(value, ScalingTensor) else value.float()
            if key == "master":
                torch.testing.assert_close(values, weight.detach(), rtol=2**-4, atol=2e-3)
            elif values.any():
                return False
    return True


@pytest.mark.parametrize(
    "level", [level if level in ("fp32", "O3") else pytest.param(level, marks=pytest.mark.nightly) for level in LEVELS]
)
def test_finetune_takes_the_weights_into_any_precision(prefix: Path, good: Path, level: str):
    held = tensors(latest(good))
    with tiny.trainer(tiny.config(prefix, precision=level, load=str(good), finetune=True)) as made:
        assert (made.training.iteration, made.training.consumed_samples, made.training.schedule.num_steps) == (0, 0, 0)
        assert fresh(made.training)
        assert all(not module.steps for name, module in made.training.model.named_modules() if name.endswith(".scaling"))
        for name, p in made.training.model.named_parameters():
            expected = held[f"model/{name}"].float()
            for scale_inv in (value for key, value in held.items() if key.startswith(f"model/{name}.scale_inv@")):
                expected *= scale_inv
            found = (p.dequantize(torch.float32) if isinstance(p, ScalingTensor) else p.float()).detach().cpu()
            coarse = level == "O3" and ".linear_" in name and name.endswith("weight")
            torch.testing.assert_close(found, expected, rtol=2**-4 if coarse else 2**-8, atol=2e-3 if coarse else 1e-6)
    if level == "O3":
        losses = resume(prefix, good, opt_level=None, precision=level, finetune=True)
        assert len(losses) == 6
        assert losses[0] < math.log(64) - 0.02


def test_without_the_optimizer_weights_and_place_are_kept(prefix: Path, good: Path):
    with tiny.trainer(tiny.config(prefix, opt_level="O2", load=str(good), no_load_optim=True)) as made:
        assert (made.training.iteration, made.training.consumed_samples) == (4, 16)
        assert fresh(made.training)
        held = tensors(latest(good))
        for name, p in made.training.model.named_parameters():
            payload = p.payload if isinstance(p, ScalingTensor) else p.detach()
            assert torch.equal(payload.cpu(), held[f"model/{name}"]), name
    assert all(map(math.isfinite, resume(prefix, good, no_load_optim=True)))


def test_random_state_is_restored_or_not(prefix: Path, tmp_path: Path):
    checkpoints.saved(prefix, tmp_path, hidden_dropout=0.1, train_iters=2)
    state = tensors(latest(tmp_path))["rng/0/torch"]
    for without in (False, True):
        with tiny.trainer(tiny.config(prefix, hidden_dropout=0.1, load=str(tmp_path), no_load_rng=without)):
            assert torch.equal(torch.get_rng_state(), state) != without


def test_a_checkpoint_of_early_warm_up_in_fp16_is_loaded(prefix: Path, tmp_path: Path):
    """Biases begin at zero: after steps of 1e-7 they are a few of FP16's smallest steps, far from their masters in relation."""
    settings = {"precision": "fp16-amp", "initial_loss_scale": 256.0, "lr": 1e-7, "min_lr": 1e-8}
    checkpoints.saved(prefix, tmp_path, **settings)
    held = checkpoints.tensors(latest(tmp_path))
    apart = [
        key
        for key, x in held.items()
        if key.startswith("master/") and ((x - held[key.replace("master", "model", 1)].float()).abs() > x.abs() / 8).any()
    ]
    assert len(apart) > 3
    with tiny.trainer(tiny.config(prefix, **settings, load=str(tmp_path), train_iters=5)) as made:
        assert made.training.iteration == 4


def test_counters_are_remembered(prefix: Path, tmp_path: Path):
    settings = tiny.config(prefix, opt_level="O2", train_iters=5)
    with tiny.trainer(settings) as made:
        made.run()
        made.training.passed_over, made.training.optimizer.skipped_steps = 12, 3
        save(made.training, tmp_path)
    with tiny.trainer(pointed(settings, load=str(tmp_path))) as made:
        training = made.training
        assert (training.iteration, training.consumed_samples, training.passed_over) == (5, 20, 12)
        assert training.optimizer.skipped_steps == 3
