"""The table of faults in a checkpoint, each with its outcome.

Torn ones (bytes that are not those that were written, or no checkpoint of this code) are passed over for the next older whole one, with a
message; where there is none, and for whatever is wrong behind sound digests, loading ends with a ValueError that names the file or the
tensor, on an unchanged run, and the folder stays as it is.
"""

import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from helpers import checkpoints, tiny
from helpers.checkpoints import contents, everything, pointed, rewrite, seal, tensors
from megatron.lm.checkpoint import load
from megatron.lm.checkpoint.files.folder import INFO_FILE
from megatron.lm.run.trainer import Trainer

DATA, PLAN = "__0_0.bin", "plan.json"
FC1, NORM = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"
SCALING = "decoder.layers.1.mlp.linear_fc1.scaling"
NAN, INFINITE = float("nan"), float("inf")


class Fault(NamedTuple):
    """What is done to a checkpoint's folder, and what loading says of it."""

    damage: Callable[[Path], object]
    said: str


class RunsCode:
    """Makes a file in the folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.folder}/ran",)


def flip(name: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 16
        (folder / name).write_bytes(data)

    return damage


def foreign(*files: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            torch.save({"iteration": 4}, folder / name)

    return damage


TORN = {  # more: files/test_folder.py
    "a flipped bit in a shard": Fault(flip(DATA), f"{DATA} is damaged: its SHA-256 is not that in {INFO_FILE}"),
    "a flipped bit in the plan": Fault(flip(PLAN), f"{PLAN} is damaged: its SHA-256 is not that in {INFO_FILE}"),
    "a missing plan": Fault(lambda folder: (folder / PLAN).unlink(), f"{PLAN} is missing"),
    "an older version of ours": Fault(foreign("mp_rank_00_000.pt", "rng_00000.pt"), "was written by an earlier version of this code"),
    "Megatron-LM's": Fault(foreign("mp_rank_00/model_optim_rng.pt"), "was written by Megatron-LM"),
    "any folder": Fault(foreign("weights.pt"), "is not a checkpoint"),
}


def changed(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    return lambda folder: rewrite(folder, {key: change(tensors(folder)[key])})


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(x: torch.Tensor) -> torch.Tensor:
        values = x.float()
        values.view(-1)[0] = value
        return values.to(x.dtype)

    return change


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda scale_inv: scale_inv * factor


def plan_that_runs_code(folder: Path) -> None:
    """A pickle in place of the plan."""
    (folder / PLAN).write_bytes(pickle.dumps(RunsCode(folder)))
    seal(folder)


def plan_that_leads_out(folder: Path) -> None:
    (folder / PLAN).write_text((folder / PLAN).read_text().replace(DATA, f"../iter_0000002/{DATA}"))
    seal(folder)


def of(state: str, name: str = FC1) -> str:
    return f"{state}/{name}"


def scale(state: str) -> str:
    return f"{state}/{FC1}.scale_inv@0,0"


SOUND = {  # in its digests
    "another vocabulary": Fault(lambda folder: seal(folder, vocab_size=61), r"a tokenizer of 60 tokens \(saved: 61\)"),
    "NaN in a weight": Fault(changed(of("model", NORM), first(NAN)), f"{of('model', NORM)} has 1 values that are NaN or infinite"),
    "NaN in an FP8 weight": Fault(changed(of("model"), first(NAN)), f"{of('model')} has 1 values that are NaN"),
    "infinity in a master": Fault(changed(of("master"), first(INFINITE)), f"{of('master')} has 1 values that are NaN or infinite"),
    "NaN in m": Fault(changed(of("exp_avg"), first(NAN)), f"{of('exp_avg')} has 1 values that are NaN"),
    "infinity in v": Fault(changed(of("exp_avg_sq"), first(INFINITE)), f"{of('exp_avg_sq')} has 1 values that are NaN"),
    "a scale that is no power of two": Fault(changed(scale("exp_avg"), times(1.5)), f"{of('exp_avg')} has scale_inv .* not a power of two"),
    "a scale of 0": Fault(changed(scale("model"), times(0)), f"{of('model')} has scale_inv 0, which is not a power of two"),
    "a negative scale": Fault(changed(scale("master"), times(-1)), f"{of('master')} has scale_inv -.*, which is not a power of two"),
    "a master's scale of 2^127": Fault(
        changed(scale("master"), lambda x: torch.full_like(x, 2.0**127)),
        rf"{of('master')} has scale_inv 1.70141e\+38, which is not a power",
    ),
    "a negative value in v": Fault(changed(of("exp_avg_sq"), first(-1.0)), f"{of('exp_avg_sq')}, a mean of squares, has 1 negative values"),
    "a step that is NaN": Fault(changed(of("step"), first(NAN)), rf"step/{FC1} is nan; it must be one torch.float32 in \[0, 4\]"),
    "a step to come": Fault(changed(of("step"), first(5)), f"step/{FC1} is 5.0; it must be"),
    "more than one step": Fault(changed(of("step"), lambda x: x.expand(2).clone()), rf"step/{FC1} is \[.*\]; it must be one"),
    **{
        f"{name} of {value:g} in the scaling of a layer": Fault(
            changed(f"model/{SCALING}.{name}", first(value)), rf"{SCALING}\.{name} contains {value:g}; it must be in"
        )
        for name, values in {"scale": (0, INFINITE, NAN), "history": (-1,)}.items()
        for value in values
    },
    "random states that are none": Fault(changed("rng/0/torch", torch.zeros_like), "its random states are invalid .*--no-load-rng"),
    "a weight of whole numbers": Fault(changed(of("model", NORM), lambda x: x.long()), f"{of('model', NORM)} is torch.int64, which is not"),
    "an infinite scale": Fault(changed(scale("exp_avg_sq"), times(INFINITE)), f"{of('exp_avg_sq')} has scale_inv inf"),
    "a scale that is NaN": Fault(changed(scale("model"), times(NAN)), f"{of('model')} has scale_inv nan"),
    "FP8 without a scale": Fault(lambda f: rewrite(f, {}, [scale("model")]), rf"has no {scale('model')}"),
    "a weight missing": Fault(lambda f: rewrite(f, {}, [of("model", NORM)]), f"has no {of('model', NORM)}; load an older"),
    "m missing": Fault(lambda f: rewrite(f, {}, [of("exp_avg")]), f"has no {of('exp_avg')}; load an older"),
    "a weight of another shape": Fault(
        changed(of("model", NORM), lambda x: x[:3].clone()), rf"{of('model', NORM)} is \(3,\), but the model requires \(32,\)"
    ),
    "no states at all": Fault(
        lambda f: rewrite(f, {}, [key for key in tensors(f) if key.startswith("exp_avg")]),
        "contains only weights; load them with --finetune",
    ),
    "a data file without a digest": Fault(lambda f: seal(f, files={}), f"{DATA} has no digest in checkpoint.json"),
    "a plan that runs code": Fault(plan_that_runs_code, rf"{PLAN} cannot be read \("),
    "a plan that leads out": Fault(plan_that_leads_out, rf"{PLAN} cannot be read \(it names '\.\./iter_0000002/{DATA}', which is outside"),
}
FAULTS = TORN | SOUND


@pytest.fixture(scope="module")
def good(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 2 and 4 of an O3 run; copy it before changing anything."""
    return checkpoints.saved(prefix, tmp_path_factory.mktemp("good"), precision="O3", save_interval=2)


@pytest.fixture(scope="module")
def made(prefix: Path, good: Path) -> Iterator[Trainer]:
    """One trainer for all faults: loading leaves it as it was, or as the checkpoint says."""
    with tiny.trainer(tiny.config(prefix, precision="O3", train_iters=6, lr_decay_iters=4)) as made:  # the schedule of `good`
        yield made


@pytest.fixture
def copy(made: Trainer, good: Path, tmp_path: Path) -> Path:
    """A copy of the good folder, which `made` is to load."""
    copy = Path(shutil.copytree(good, tmp_path / "copy"))
    made.training.config = pointed(made.config, load=str(copy))
    return copy


def refused(made: Trainer, copy: Path, said: str) -> None:
    """Loading raises a ValueError that matches `said`; neither the run nor the folder has changed."""
    before, files = everything(made), contents(copy)
    with pytest.raises(ValueError, match=said):
        load(made.training)
    assert tiny.same(before, everything(made))
    assert contents(copy) == files


@pytest.mark.promise("Checkpoints", "Impossible scales, second moments, histories, steps, random states and counts are refused.")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_where_there_is_no_older_checkpoint(made: Trainer, copy: Path, name: str):
    shutil.rmtree(copy / "iter_0000002")
    FAULTS[name].damage(copy / "iter_0000004")
    refused(made, copy, FAULTS[name].said)


@pytest.mark.parametrize("name", TORN)
def test_a_torn_checkpoint_is_passed_over_for_an_older_one(made: Trainer, copy: Path, name: str, capsys: pytest.CaptureFixture[str]):
    TORN[name].damage(copy / "iter_0000004")
    load(made.training)
    assert (made.training.iteration, made.training.consumed_samples) == (2, 8)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("passed over: ")]
    assert len(said) == 1
    assert str(copy / "iter_0000004") in said[0]


@pytest.mark.promise("Checkpoints", "An invalid checkpoint with valid digests is skipped for an older one, and the log says so.")
@pytest.mark.parametrize("name", ["NaN in a weight", "infinity in v", "a plan that runs code"])
def test_what_is_wrong_behind_sound_digests_is_passed_over_too(made: Trainer, copy: Path, name: str, capsys: pytest.CaptureFixture[str]):
    SOUND[name].damage(copy / "iter_0000004")
    load(made.training)
    assert made.training.iteration == 2
    assert re.search(rf"passed over: .*iter_0000004.*{SOUND[name].said}", capsys.readouterr().out)
    made.training.config = pointed(made.training.config, ckpt_step=4)
    refused(made, copy, SOUND[name].said)


def test_what_does_not_fit_this_run_is_not_passed_over(made: Trainer, copy: Path):
    """An older checkpoint of the same run fits no better."""
    SOUND["another vocabulary"].damage(copy / "iter_0000004")
    refused(made, copy, SOUND["another vocabulary"].said)


def test_code_in_a_plan_does_not_run(made: Trainer, copy: Path):
    plan_that_runs_code(copy / "iter_0000004")
    made.training.config = pointed(made.training.config, ckpt_step=4)
    refused(made, copy, rf"{PLAN} cannot be read \(")
    assert not (copy / "iter_0000004" / "ran").exists()
    pickle.loads((copy / "iter_0000004" / PLAN).read_bytes())
    assert (copy / "iter_0000004" / "ran").exists()  # it would have


@pytest.mark.parametrize("name", ["NaN in an FP8 weight", "infinity in a master", "a negative scale"])
def test_finetuning_refuses_bad_weights_too(made: Trainer, copy: Path, name: str):
    SOUND[name].damage(copy / "iter_0000004")
    made.training.config = pointed(made.training.config, finetune=True, ckpt_step=4)
    refused(made, copy, SOUND[name].said)
