"""Which run a checkpoint belongs to, and what a run that is no longer finite leaves for the next one."""

import json
import math
from pathlib import Path

import pytest
import torch

from helpers import checkpoints, tiny
from helpers.checkpoints import MARKER
from megatron.lm.checkpoint import latest
from megatron.lm.checkpoint.files.folder import read_info
from megatron.lm.training.run_record import Parent, Run, health_problem, run_of


def of(run: Run, iteration: int = 4) -> dict:
    """What `checkpoint.json` of a checkpoint of this run says, as JSON gives it back."""
    return json.loads(json.dumps({"run": run.entry(), "iteration": iteration, "seal": "5ea1"}))


UNNAMED = {"iteration": 4, "seal": "5ea1"}


def test_each_run_has_an_identity_of_its_own_that_is_kept_in_checkpoints():
    mine = Run()
    assert mine.id != Run().id
    assert run_of(of(mine)) == mine
    assert mine.holds(of(mine))
    assert not Run().holds(of(mine))


def test_a_run_that_resumes_is_the_same_one():
    mine = Run().child_of(of(Run()), finetune=False)
    assert Run().resumed(of(mine)) == mine


def test_a_checkpoint_without_identity_is_adopted():
    mine = Run()
    assert not mine.holds(UNNAMED)
    adopted = mine.resumed(UNNAMED)
    assert adopted.id == mine.id
    assert adopted.holds(UNNAMED)
    assert run_of(of(adopted)) == adopted


def test_a_child_names_its_parent():
    parent = Run()
    child = Run().child_of(of(parent, 6), finetune=True)
    assert child.parent == Parent(parent.id, 6, True)
    assert not child.holds(of(parent))
    assert run_of(of(child)) == child
    assert Run().child_of(UNNAMED, finetune=False).parent == Parent("5ea1", 4, False)


@pytest.mark.promise(
    "Checkpoints",
    "A run whose values are no longer finite deletes no healthy checkpoint under `--keep-last`; the next start resumes from it.",
)
def test_a_diverged_run_costs_no_healthy_checkpoint_and_the_next_goes_on_from_it(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    shared = {"opt_level": "O2", "save_interval": 2, "keep_last": 2, "save": str(folder), "load": str(folder), "max_skipped_steps": 100}
    shared |= {"lr_decay_style": "constant", "lr_warmup_iters": 0}
    tiny.run(tiny.config(prefix, train_iters=4, **shared))
    left = (4, 8, 9)
    tiny.run(tiny.config(prefix, train_iters=9, lr=1e20, **shared))
    assert sorted(path.name for path in folder.glob("iter_*")) == [f"iter_{n:07d}" for n in left]
    assert (folder / MARKER).read_text() == "4"
    problems = [health_problem(read_info(folder / f"iter_{n:07d}")) for n in left]
    assert [problem is None for problem in problems] == [True, False, False]
    assert f"saved {folder / 'iter_0000009'}, which is unhealthy: " in capsys.readouterr().out
    rows = tiny.run(tiny.config(prefix, train_iters=6, lr=1e-3, **shared))
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["iteration"] for row in trained] == [5, 6]
    assert not any(row["skipped"] for row in trained)
    assert trained[-1]["loss"] < 5
    said = capsys.readouterr().out
    assert f"resumed from {folder} at iteration 4" in said
    assert f"{folder / MARKER} names iteration 4: newer ones, 8, 9, are ignored" in said
    assert latest(folder).name == "iter_0000006"


@pytest.mark.promise("Checkpoints", "A checkpoint with NaN or infinity in a tensor is unhealthy.")
def test_a_checkpoint_with_one_nan_is_labelled_and_passed_over(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with tiny.trainer(tiny.config(prefix, train_iters=2, save=str(tmp_path / "run"), save_interval=1)) as made:
        made.run()
        with torch.no_grad():
            made.training.model.get_parameter("decoder.final_layernorm.weight")[3] = math.nan
        checkpoints.move(made.training, 3)
        assert made.saver is not None
        with made.saver as saver:
            assert saver.save() is False
    dead = tmp_path / "run" / "iter_0000003"
    assert (
        f"saved {dead}, which is unhealthy: model/decoder.final_layernorm.weight has 1 values that are NaN or infinite"
        in capsys.readouterr().out
    )
    assert latest(tmp_path / "run").name == "iter_0000002"
    with pytest.raises(ValueError, match="iter_0000003 is unhealthy: model"):
        latest(tmp_path / "run", 3)
