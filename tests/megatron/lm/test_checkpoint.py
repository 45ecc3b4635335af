"""Checkpoints: bit-exact resume at every level, other layouts, interrupted and failing saves, damage, and what is loaded of them."""

import dataclasses
import errno
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dist
import numpy
import pytest
import tiny
import torch
from torch import Tensor

from megatron.lm import checkpoint, process_groups
from megatron.lm.checkpoint import latest, load, load_for_inference, save
from megatron.lm.config import Config
from megatron.lm.cpu_home import cpu_home
from megatron.lm.step import Training
from megatron.lm.trainer import Trainer, build_training
from msamp.numerics.tensor import ScalingTensor

MARKER = "latest_checkpointed_iteration.txt"
LEVELS = ("fp32", "bf16", "O1", "O2", "O3")
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def everything(made: Trainer) -> list[Tensor]:
    """Every bit of model, optimizer, schedule, scales and random generator."""
    training = made.training
    tensors: list[Any] = [v for k, v in training.model.state_dict().items() if not k.endswith("_extra_state")]
    for p in training.model.parameters():
        tensors += [value for _, value in sorted(training.optimizer.state[p].items())]
    tensors += [torch.get_rng_state(), torch.tensor(training.schedule.num_steps), torch.tensor(training.consumed_samples)]
    tensors += [torch.tensor([group["lr"] for group in training.optimizer.param_groups], dtype=torch.float64)]
    return tiny.bits(tensors)


def trained(settings: Config) -> tuple[list[float], list[Tensor]]:
    """Losses and final bits of a run."""
    rows: list[dict[str, Any]] = []
    with tiny.trainer(settings) as made:
        made.metrics.write = rows.append  # type: ignore[method-assign]
        made.run()
        return tiny.losses(rows), everything(made)


def saved_run(prefix: Path, folder: Path, **settings: Any) -> Path:
    """A finished run of 4 steps with its checkpoint in `folder`."""
    tiny.run(tiny.config(prefix, train_iters=4, save=str(folder), **settings))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def edit(folder: Path, **changes: Any) -> None:
    """Change entries of the newest state file."""
    file = latest(folder) / checkpoint.state_file()
    torch.save(torch.load(file, weights_only=True) | changes, file)


# Resume


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("first", "last", "dropout"), [(6, 12, {}), (14, 20, DROPOUT)], ids=["just-in-time", "window-fills-dropout"])
def test_resume_is_bit_exact(prefix: Path, tmp_path: Path, level: str, first: int, last: int, dropout: dict[str, float]):
    shared = {"precision": level, "train_iters": last, "micro_batch_size": 2, "global_batch_size": 4, **dropout}
    straight, bits = trained(tiny.config(prefix, **shared))
    before, _ = trained(tiny.config(prefix, exit_interval=first, save=str(tmp_path), **shared))
    after, resumed_bits = trained(tiny.config(prefix, load=str(tmp_path), **shared))
    assert (len(before), len(after)) == (first, last - first)
    assert before + after == straight
    assert tiny.same(bits, resumed_bits)


@pytest.mark.parametrize("flags", [{"fp8_scaling": "current"}, {"master_format": "bf16"}, {"exp_avg_sq_format": "fp8-e4m3"}], ids=str)
def test_resume_is_bit_exact_in_other_formats(prefix: Path, tmp_path: Path, flags: dict[str, str]):
    shared = {"opt_level": "O2", "train_iters": 8, **flags}
    straight, bits = trained(tiny.config(prefix, **shared))
    before, _ = trained(tiny.config(prefix, exit_interval=4, save=str(tmp_path), **shared))
    after, resumed_bits = trained(tiny.config(prefix, load=str(tmp_path), **shared))
    assert before + after == straight
    assert tiny.same(bits, resumed_bits)


def test_resume_counts_on(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tiny.run(tiny.config(prefix, train_iters=6, exit_interval=4, save=str(tmp_path)))
    rows = tiny.run(tiny.config(prefix, train_iters=6, load=str(tmp_path), save=str(tmp_path)))
    assert [(row["iteration"], row["tokens"]) for row in rows if row["kind"] == "train"] == [(5, 320), (6, 384)]
    assert f"resumed from {tmp_path} at iteration 4" in capsys.readouterr().out
    assert (tmp_path / MARKER).read_text() == "6"


def test_a_finished_run_started_again_trains_no_step(prefix: Path, tmp_path: Path):
    saved_run(prefix, tmp_path)
    rows = tiny.run(tiny.config(prefix, train_iters=4, load=str(tmp_path), eval_iters=1))
    assert [row["kind"] for row in rows] == ["precision", "valid", "test"]


def test_a_skipped_step_is_remembered(prefix: Path, tmp_path: Path):
    settings = tiny.config(prefix, opt_level="O2", save=str(tmp_path))
    with tiny.trainer(settings) as made:
        made.training.optimizer.skipped_steps = 3
        made._save()
    with tiny.trainer(dataclasses.replace(settings, checkpoint=dataclasses.replace(settings.checkpoint, load=str(tmp_path)))) as made:
        assert made.training.optimizer.skipped_steps == 3


# Saves that do not come to their end


def failing_save(folder: str) -> str:
    """What a save says whose state file cannot be written by rank 0."""
    settings = tiny.config("corpus")
    with tiny.started(settings), pytest.MonkeyPatch.context() as patch:
        training = build_training(settings, tiny.VOCABULARY)
        if torch.distributed.get_rank() == 0:
            patch.setattr(checkpoint.torch, "save", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(ValueError, match=r"cannot save to") as error:
            save(training, Path(folder))
        return str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on one GPU")
def test_a_save_that_fails_on_one_rank_ends_on_both(tmp_path: Path):
    for said in dist.run(failing_save, 2, str(tmp_path), timeout=40):
        assert "No space left" in said


@pytest.fixture(scope="module")
def good(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of iteration 4 of an O2 run; copy it before changing anything."""
    return saved_run(prefix, tmp_path_factory.mktemp("good"), opt_level="O2")


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


def resume(prefix: Path, folder: Path, **settings: Any) -> list[float]:
    settings = {"opt_level": "O2", "train_iters": 6} | settings
    return tiny.losses(tiny.run(tiny.config(prefix, load=str(folder), **settings)))


@pytest.mark.parametrize("written", ["nothing", "half of the state", "all but the marker"])
def test_a_kill_in_the_middle_of_a_save_leaves_the_last_checkpoint(prefix: Path, copy: Path, good: Path, written: str):
    if written == "all but the marker":
        shutil.copytree(copy / "iter_0000004", copy / "iter_0000005")
    else:
        (copy / "iter_0000005.partial").mkdir()
        if written == "half of the state":
            whole = (copy / "iter_0000004" / "mp_rank_00_000.pt").read_bytes()
            (copy / "iter_0000005.partial" / "mp_rank_00_000.pt").write_bytes(whole[: len(whole) // 2])
    assert resume(prefix, copy) == resume(prefix, good)
    assert resume(prefix, copy, save=str(copy))  # and the next save clears what the kill left
    assert sorted(path.name for path in copy.iterdir() if ".partial" in path.name and "0000006" in path.name) == []
    assert (copy / MARKER).read_text() == "6"


@pytest.mark.parametrize("at", ["fsync", "iter_0000004", "iter_0000004.partial", MARKER])
def test_a_kill_while_the_same_iteration_is_saved_again(prefix: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, at: str):
    """A finished run that is started once more saves its last iteration over itself."""

    rename = Path.rename

    def dying(self: Path, target: Path) -> Path:
        if self.name.startswith(at):
            raise KeyboardInterrupt
        return rename(self, target)

    if at == "fsync":
        monkeypatch.setattr(checkpoint.os, "fsync", Mock(side_effect=KeyboardInterrupt))
    else:
        monkeypatch.setattr(Path, "rename", dying)
    with pytest.raises(KeyboardInterrupt):
        tiny.run(tiny.config(prefix, opt_level="O2", train_iters=4, load=str(copy), save=str(copy)))
    monkeypatch.undo()
    assert resume(prefix, copy)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")]
)
def test_a_full_disk_leaves_the_last_checkpoint(prefix: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, error: Exception):
    before = contents(copy)

    with tiny.trainer(tiny.config(prefix, opt_level="O2", train_iters=6, load=str(copy), save=str(copy))) as made:
        monkeypatch.setattr(checkpoint.torch, "save", Mock(side_effect=error))
        with pytest.raises(ValueError, match=r"cannot save to .*iter_0000004.*free space.* choose another --save"):
            save(made.training, copy)
    assert contents(copy) == before


def test_a_folder_that_cannot_be_made(prefix: Path):
    with tiny.trainer(tiny.config(prefix)) as made, pytest.raises(ValueError, match=r"cannot save to .*choose another --save"):
        save(made.training, Path(f"{prefix}.bin") / "save")  # below a file


# What is refused, with nothing changed


def untouched(prefix: Path, folder: Path, said: str, **settings: Any) -> None:
    """Loading raises a ValueError that matches `said`, and neither the training state nor the folder has changed."""
    config = tiny.config(prefix, **({"opt_level": "O2", "train_iters": 6} | settings))
    files = contents(folder)
    with tiny.trainer(config) as made:
        before = everything(made)
        loading = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, load=str(folder)))
        made.training.config = loading
        with pytest.raises(ValueError, match=said):
            load(made.training)
        assert tiny.same(before, everything(made))
        assert (made.training.iteration, made.training.consumed_samples) == (0, 0)
    assert contents(folder) == files


@pytest.mark.parametrize("damage", ["cut short", "empty", "noise", "a list", "no model", "a weight missing", "a weight of another shape"])
def test_a_damaged_state_file(prefix: Path, copy: Path, damage: str):
    file = copy / "iter_0000004" / "mp_rank_00_000.pt"
    state = torch.load(file, weights_only=True)
    if damage == "cut short":
        file.write_bytes(file.read_bytes()[:-500])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "noise":
        file.write_bytes(bytes(range(256)) * 64)
    elif damage == "a list":
        torch.save([1, 2], file)
    elif damage == "no model":
        del state["model"]
        torch.save(state, file)
    elif damage == "a weight missing":
        del state["model"]["decoder.final_layernorm.weight"]
        torch.save(state, file)
    else:
        state["model"]["decoder.final_layernorm.weight"] = torch.ones(3)
        torch.save(state, file)
    untouched(prefix, copy, r"state\.pt|iter_0000004")


@pytest.mark.parametrize(("level", "value"), [("fp32", "nan"), ("O2", "inf"), ("O3", "nan")])
@pytest.mark.parametrize("weight", ["decoder.layers.1.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"])
def test_a_weight_that_is_not_finite(prefix: Path, tmp_path: Path, level: str, value: str, weight: str):
    saved_run(prefix, tmp_path, precision=level)
    model = torch.load(tmp_path / "iter_0000004" / "mp_rank_00_000.pt", weights_only=True)["model"]
    if isinstance(model[weight], ScalingTensor):
        model[weight].scale_inv.fill_(float(value))
    else:
        model[weight][0] = float(value)
    edit(tmp_path, model=model)
    said = f"{weight}.*(NaN|finite)"
    untouched(prefix, tmp_path, said, opt_level=None, precision=level)
    with pytest.raises(ValueError, match=said):
        tiny.run(tiny.config(prefix, precision=level, load=str(tmp_path), finetune=True))


def test_a_master_weight_that_is_not_finite(prefix: Path, tmp_path: Path):
    saved_run(prefix, tmp_path, opt_level="O0")
    optimizer = torch.load(tmp_path / "iter_0000004" / "mp_rank_00_000.pt", weights_only=True)["optimizer"]
    optimizer["state"][0]["master"][0] = math.nan
    edit(tmp_path, optimizer=optimizer)
    untouched(prefix, tmp_path, "NaN|finite", opt_level="O0")


@pytest.mark.parametrize("damage", ["cut short", "noise"])
def test_a_damaged_random_state(prefix: Path, copy: Path, damage: str):
    file = copy / "iter_0000004" / "rng_00000.pt"
    file.write_bytes(file.read_bytes()[:-500] if damage == "cut short" else b"noise")
    untouched(prefix, copy, r"rng_00000\.pt.*(--no-load-rng|older)")
    assert len(resume(prefix, copy, no_load_rng=True)) == 2


@pytest.mark.parametrize("marker", [None, "", "four", "9"])
def test_a_marker_that_leads_nowhere(prefix: Path, copy: Path, marker: str | None):
    if marker is None:
        (copy / MARKER).unlink()
    else:
        (copy / MARKER).write_text(marker)
    untouched(prefix, copy, f"{MARKER}.*(give|name|restore)")


def test_an_older_iteration_can_be_named(prefix: Path, tmp_path: Path):
    tiny.run(tiny.config(prefix, train_iters=4, save=str(tmp_path), save_interval=2))
    (tmp_path / MARKER).write_text("2\n")
    rows = tiny.run(tiny.config(prefix, train_iters=4, load=str(tmp_path)))
    assert [row["iteration"] for row in rows if row["kind"] == "train"] == [3, 4]


def test_a_version_of_the_future(prefix: Path, copy: Path):
    edit(copy, version=checkpoint.VERSION + 1)
    untouched(prefix, copy, f"version {checkpoint.VERSION + 1}.*reads version {checkpoint.VERSION}")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_layers": 3}, r"--num-layers 3 \(saved: 2\).*Give the saved values"),
        ({"hidden_size": 64}, r"--hidden-size 64 \(saved: 32\)"),
        ({"swiglu": True}, r"--swiglu True \(saved: False\)"),
        ({"untie_embeddings_and_output_weights": True}, "--untie-embeddings-and-output-weights True"),
        ({"vocab_size": 64}, r"--vocab-size 64 \(saved: 60\)"),
        ({"opt_level": "O1"}, r"precision O1 \(saved: O2; --finetune"),
        ({"opt_level": "O0"}, r"precision bf16 \(saved: O2; --finetune"),
        ({"opt_level": "O3"}, r"precision O3 \(saved: O2; --finetune"),
        ({"fp8_scaling": "current"}, "--fp8-scaling current"),
        ({"master_format": "bf16"}, "master.*bf16"),
        ({"exp_avg_format": "fp32"}, "(exp-avg-format|'m').*fp32"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_model_or_precision(prefix: Path, copy: Path, settings: dict[str, Any], said: str):
    untouched(prefix, copy, said, **settings)


def hugging_face(folder: Path, words: int) -> Path:
    """A word-level tokenizer.json."""
    vocabulary = {str(i): i for i in range(words - 1)} | {"<|endoftext|>": words - 1}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"}
    added = {"id": words - 1, "content": "<|endoftext|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    file = folder / f"tokenizer-{words}.json"
    file.write_text(
        json.dumps({"version": "1.0", "added_tokens": [added | flags], "pre_tokenizer": {"type": "Whitespace"}, "model": model})
    )
    return file


@pytest.mark.parametrize("words", [62, 100], ids=["same-padded-size", "other-padded-size"])
def test_a_checkpoint_of_another_vocabulary(prefix: Path, tmp_path: Path, words: int):
    tokenizers = {"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": None}
    saved = saved_run(prefix, tmp_path / "save", opt_level="O2", tokenizer_model=str(hugging_face(tmp_path, 60)), **tokenizers)
    untouched(prefix, saved, f"{words}.*60|60.*{words}", tokenizer_model=str(hugging_face(tmp_path, words)), **tokenizers)


@pytest.mark.parametrize("settings", [{"attention_backend": "math"}, {"hidden_dropout": 0.1}, {"attention_dropout": 0.1}], ids=str)
def test_what_is_no_shape_may_change(prefix: Path, copy: Path, settings: dict[str, Any]):
    """Going on with another kernel (another machine) or another dropout leaves every weight its meaning."""
    assert len(resume(prefix, copy, **settings)) == 2


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


def weights_of(prefix: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    with tiny.trainer(tiny.config(prefix, **settings)) as made:
        found = {
            name: (p.dequantize(torch.float32) if isinstance(p, ScalingTensor) else p.float()).detach().clone()
            for name, p in made.training.model.named_parameters()
        }
        assert (made.training.iteration, made.training.consumed_samples, made.training.schedule.num_steps) == (0, 0, 0)
        assert fresh(made.training)
        assert all(not module.steps for name, module in made.training.model.named_modules() if name.endswith(".scaling"))
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_finetune_takes_the_weights_into_any_precision(prefix: Path, good: Path, level: str):
    saved = torch.load(good / "iter_0000004" / "mp_rank_00_000.pt", weights_only=True)["model"]
    found = weights_of(prefix, {"precision": level, "load": str(good), "finetune": True})
    assert set(found) == {name for name in saved if ".scaling." not in name}
    for name, values in found.items():
        expected = saved[name].dequantize(torch.float32) if isinstance(saved[name], ScalingTensor) else saved[name].float()
        coarse = level == "O3" and ".linear_" in name and name.endswith("weight")
        torch.testing.assert_close(values, expected.to(values.device), rtol=2**-4 if coarse else 2**-8, atol=2e-3 if coarse else 1e-6)
    losses = resume(prefix, good, opt_level=None, precision=level, finetune=True)
    assert len(losses) == 6
    assert losses[0] < math.log(64) - 0.02


def test_without_the_optimizer_weights_and_place_are_kept(prefix: Path, good: Path):
    with tiny.trainer(tiny.config(prefix, opt_level="O2", load=str(good), no_load_optim=True)) as made:
        assert (made.training.iteration, made.training.consumed_samples) == (4, 16)
        assert fresh(made.training)
        saved = torch.load(good / "iter_0000004" / "mp_rank_00_000.pt", weights_only=True)["model"]
        for name, p in made.training.model.named_parameters():
            assert torch.equal(p.cpu(), saved[name]), name
    assert all(map(math.isfinite, resume(prefix, good, no_load_optim=True)))


def test_random_state_is_restored_or_not(prefix: Path, tmp_path: Path):
    saved_run(prefix, tmp_path, hidden_dropout=0.1)
    state = torch.load(tmp_path / "iter_0000004" / "rng_00000.pt", weights_only=True)["torch"]
    for without in (False, True):
        with tiny.trainer(tiny.config(prefix, hidden_dropout=0.1, load=str(tmp_path), no_load_rng=without)):
            assert torch.equal(torch.get_rng_state(), state) != without


def test_random_generators_of_python_and_numpy_are_restored(prefix: Path, tmp_path: Path):
    with tiny.trainer(tiny.config(prefix, save=str(tmp_path))) as made:
        random.gauss(0, 1)  # leaves a second value waiting in the generator
        numpy.random.standard_normal()
        made._save()
        expected = [random.gauss(0, 1), random.random(), numpy.random.standard_normal(), torch.rand(1).item()]
    with tiny.trainer(tiny.config(prefix, load=str(tmp_path))):
        assert [random.gauss(0, 1), random.random(), numpy.random.standard_normal(), torch.rand(1).item()] == expected


@pytest.mark.parametrize("level", LEVELS)
def test_files_hold_no_code(prefix: Path, tmp_path: Path, level: str):
    saved_run(prefix, tmp_path, precision=level)
    files = sorted(tmp_path.glob("iter_*/*.pt"))
    assert [file.name for file in files] == ["mp_rank_00_000.pt", "rng_00000.pt"]
    for file in files:
        assert torch.load(file, weights_only=True)
    state = torch.load(files[0], weights_only=True)
    json.dumps(state["config"])
    assert state["iteration"] == 4


# Inference


@pytest.mark.parametrize("level", LEVELS)
def test_the_loaded_model_gives_the_logits_of_the_trained_one(prefix: Path, tmp_path: Path, level: str):
    tokens = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).expand(2, 16)
    with tiny.trainer(tiny.config(prefix, precision=level, train_iters=18, hidden_dropout=0.1, save=str(tmp_path))) as made:
        made.run()
        device = process_groups.device()
        with torch.no_grad():
            expected = made.training.model.eval()(tokens.to(device), positions.to(device), None)
        model, config, tokenizer = load_for_inference(tmp_path)  # the process groups are there already
        with torch.no_grad():
            assert torch.equal(model(tokens.to(device), positions.to(device), None), expected)
    assert not model.training
    assert config.model.hidden_size == 32
    assert tokenizer.vocab_size == tiny.VOCABULARY


def test_inference_makes_its_own_process_groups(good: Path):
    with cpu_home():
        try:
            model, _, _ = load_for_inference(str(good))
            assert torch.distributed.get_world_size() == 1
            tokens = torch.zeros(1, 5, dtype=torch.int64, device=process_groups.device())
            assert model(tokens, tokens, None).shape == (1, 5, 64)
        finally:
            process_groups.shutdown()


def test_inference_from_nothing_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=f"holds no checkpoint.*{MARKER}"):
        load_for_inference(tmp_path)
