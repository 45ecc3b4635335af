"""Which steps make a checkpoint unhealthy, by the definition; and what a diverged run leaves for the next one."""

import json
import math
from pathlib import Path

import pytest
import torch

from helpers import checkpoints, tiny
from helpers.checkpoints import MARKER
from megatron.lm.checkpoint import latest
from megatron.lm.checkpoint.files.folder import read_info
from megatron.lm.training import health
from megatron.lm.training.health import FACTOR, LEAST, WINDOW, Health


def after(*losses: float) -> Health:
    """Of a run with these losses."""
    found = Health()
    for iteration, loss in enumerate(losses, start=1):
        found.stepped(iteration, loss)
    return found


def test_a_loss_above_twice_its_running_mean_is_a_problem_until_it_is_back():
    assert after(4.0, 3.0, 2.0).problem is None
    assert after(4.0, 2.0, FACTOR * 3.0).problem is None
    spiked = after(4.0, 2.0, 6.5)
    assert spiked.problem == "the loss of iteration 3, 6.5, is more than 2 times the mean 3 before it"
    assert spiked.mean_loss == 3.0
    for iteration in range(4, 4 + 2 * WINDOW):
        spiked.stepped(iteration, 6.5)
    assert spiked.problem is not None  # no habit makes it healthy
    spiked.stepped(999, 2.9)
    assert spiked.problem is None


def test_the_mean_forgets():
    assert after(*[8.0] * 50, *[3.0] * 600).mean_loss == pytest.approx(3.0, abs=0.05)
    assert after(4.0, 3.0, 2.0).mean_loss == pytest.approx(3.0)


def test_a_loss_near_0_may_double():
    assert after(0.01, 0.09, 1.9 * LEAST).problem is None
    assert after(0.01, 0.09, 2.1 * LEAST).problem is not None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_problem_and_not_in_the_mean(loss: float):
    found = after(4.0, loss)
    assert found.problem == f"the loss of iteration 2 is {loss}"
    assert found.mean_loss == 4.0


def test_a_skipped_step_is_a_problem_unless_a_scale_is_searched():
    found = after(4.0)
    found.skipped(2, searches_scale=True)
    assert found.problem is None
    found.skipped(3, searches_scale=False)
    assert found.problem == "iteration 3 was skipped: its loss or gradient was non-finite"
    found.stepped(4, 4.0)
    assert found.problem is None


def test_steps_that_all_fail_speak_against_the_checkpoint_before_them():
    found = after(4.0, 3.0)
    found.skipped(3, searches_scale=False)
    assert found.against(2) is None  # one bad batch
    found.stepped(4, math.nan)
    assert found.against(2) == "all steps after it failed: the loss of iteration 4 is nan"
    assert found.against(1) is None
    found.stepped(5, 3.0)
    assert found.against(2) is None


def test_what_is_written_is_what_the_next_run_goes_on_from():
    found = after(4.0, 3.0)
    entry = json.loads(json.dumps(found.entry([])))
    assert health.of({"health": entry}) == found
    assert health.problem_of({"health": entry}) is None
    spoiled = found.entry(["model/a", "model/b", "master/a", "exp_avg/a"])
    assert health.problem_of({"health": spoiled}) == "model/a; model/b; master/a; and 1 more"
    assert health.of({"health": spoiled}) == Health()
    assert health.of({}) == Health()  # of a version that said nothing
    assert health.problem_of({}) is None


@pytest.mark.promise("Checkpoints", "A diverging run under `--keep-last` deletes no healthy checkpoint; the next start resumes from it.")
def test_a_diverged_run_costs_no_healthy_checkpoint_and_the_next_goes_on_from_it(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    shared = {"opt_level": "O2", "save_interval": 2, "keep_last": 2, "save": str(folder), "load": str(folder), "max_skipped_steps": 100}
    shared |= {"lr_decay_style": "constant", "lr_warmup_iters": 0}
    tiny.run(tiny.config(prefix, train_iters=4, **shared))
    left = (2, 4, 8, 9)  # 2 too, since the steps after 4 might yet have spoken against it
    tiny.run(tiny.config(prefix, train_iters=9, lr=1e20, **shared))
    assert sorted(path.name for path in folder.glob("iter_*")) == [f"iter_{n:07d}" for n in left]
    assert (folder / MARKER).read_text() == "4"
    problems = [health.problem_of(read_info(folder / f"iter_{n:07d}")) for n in left]
    assert [problem is None for problem in problems] == [True, True, False, False]
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


@pytest.mark.nightly(4)
def test_a_checkpoint_right_after_the_step_that_ruined_it_is_condemned(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "run"
    shared = {
        "save_interval": 1,
        "keep_last": 2,
        "save": str(folder),
        "load": str(folder),
        "lr_decay_style": "constant",
        "lr_warmup_iters": 0,
    }
    tiny.run(tiny.config(prefix, opt_level="O2", train_iters=3, **shared))
    # The weights end below 2^64, 1.8e19: beyond it the save itself is unhealthy, and no later step is asked.
    tiny.run(tiny.config(prefix, opt_level="O2", train_iters=7, lr=1.2e19, **shared))
    assert (folder / MARKER).read_text() == "3"
    assert latest(folder).name == "iter_0000003"
    printed = capsys.readouterr().out
    assert f"saved {folder / 'iter_0000004'}\n" in printed  # as a healthy one
    assert "iter_0000004 is unhealthy: all steps after it failed: iteration 6 was skipped" in printed


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
