"""The way back to a run's own checkpoint, and a run that resumes by itself."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import tiny
from helpers.faulty import BATCH, Once, louder, patched, rolling, told, trained
from megatron.lm.config.rules.check import check
from megatron.lm.errors import RunStopped


@pytest.mark.parametrize("level", [pytest.param("bf16", marks=pytest.mark.nightly), "O3"])
def test_a_rollback_goes_on_from_the_checkpoint_with_the_data_behind_the_spike(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str
):
    with patched(Once(6)):
        rows, weights = trained(rolling(prefix, tmp_path / "a", precision=level, train_iters=12))
    assert [row["iteration"] for row in told(rows, "train")] == [*range(1, 8), *range(5, 13)]
    assert told(rows, "rollback") == [{"kind": "rollback", "iteration": 7, "to": 4, "passed_over": 3 * BATCH}]
    assert "rolled back from iteration 7 to iteration 4 (1 of 3 times to" in capsys.readouterr().out

    tiny.run(tiny.config(prefix, precision=level, train_iters=12, exit_interval=4, save=str(tmp_path / "b")))
    with tiny.trainer(tiny.config(prefix, precision=level, train_iters=12, load=str(tmp_path / "b"))) as made:
        made.training.passed_over = 3 * BATCH
        rest: list[dict[str, Any]] = []
        made.metrics.write = rest.append  # type: ignore[method-assign]
        made.run()
        assert tiny.same(weights, tiny.bits(made.training.model.parameters()))
    assert tiny.losses(rows)[7:] == tiny.losses(rest)

    resumed = tiny.run(tiny.config(prefix, precision=level, train_iters=12, load=str(tmp_path / "a"), ckpt_step=8))
    assert tiny.losses(resumed) == tiny.losses(rows)[-4:]  # the checkpoint tells how much was passed over


def test_a_spike_is_known_before_its_checkpoint_is_written(prefix: Path, tmp_path: Path):
    with patched(Once(8)):
        rows, _ = trained(rolling(prefix, tmp_path, train_iters=10))
    assert told(rows, "rollback") == [{"kind": "rollback", "iteration": 8, "to": 4, "passed_over": 4 * BATCH}]


def test_rollbacks_to_one_checkpoint_come_to_an_end(prefix: Path, tmp_path: Path):
    with patched(louder(6)), pytest.raises(RunStopped, match=r"3 rollbacks to iteration 4 in .*--lr.*--loss-spike-threshold"):
        trained(rolling(prefix, tmp_path, train_iters=10))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_without_a_checkpoint_of_its_own_a_run_goes_on(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = rolling(prefix, tmp_path, train_iters=8)
    with patched(Once(4)):
        rows, _ = trained(replace(settings, checkpoint=replace(settings.checkpoint, save_interval=6)))
    assert [row["iteration"] for row in told(rows, "train")] == [*range(1, 9)]
    assert "has no checkpoint of this run so far, so there is no rollback" in capsys.readouterr().out


def test_at_the_end_of_the_data_the_passed_over_is_made_up_for_from_its_start(prefix: Path):
    with tiny.trainer(tiny.config(prefix, train_iters=6)) as made:
        assert made.train_data is not None
        whole = len(made.train_data) // BATCH  # type: ignore[arg-type]
        tokens = [batch["tokens"] for batch in made._batches(made.train_data, 0)]
        made.training.consumed_samples, made.training.passed_over = 2 * BATCH, (whole - 3) * BATCH
        found = [batch["tokens"] for batch in itertools.islice(made._training_batches(), 4)]
        made.training.passed_over = (whole - 1) * BATCH
        again = next(made._training_batches())["tokens"]
    assert all(torch.equal(a, b) for a, b in zip(found, [tokens[-1], *tokens[:3]], strict=True))
    assert torch.equal(again, tokens[1])


@pytest.mark.promise("Checkpoints", "A rollback loads a healthy checkpoint.")
def test_a_rollback_passes_over_an_unhealthy_checkpoint(prefix: Path, tmp_path: Path):
    settings = tiny.config(prefix, train_iters=10, save=str(tmp_path), save_interval=4)
    with tiny.trainer(settings) as made:
        made.run()
        made.training.iteration, made.training.problem = 12, "it diverged"
        assert made.saver is not None
        with made.saver:
            made._save()
        assert made.rollback.iteration == 10
        assert "rolled back from iteration 12 to iteration 10 (1 of 3 times" in made.rollback.go(made.training)


def test_a_run_whose_load_is_its_save_starts_anew_and_then_resumes(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = str(tmp_path / "run")
    settings = tiny.config(prefix, opt_level="O2", train_iters=8, exit_interval=5, save=folder, load=folder + "/")
    check(settings, 1)
    first, _ = trained(settings)
    assert (
        f"warning: --load {folder}/ holds no checkpoint, and is the folder of --save: training starts from scratch"
        in capsys.readouterr().out
    )
    second, weights = trained(settings)
    said = capsys.readouterr().out
    assert "resumed from" in said
    assert "warning: --load" not in said
    straight, expected = trained(tiny.config(prefix, opt_level="O2", train_iters=8))
    assert tiny.losses(first + second) == tiny.losses(straight)
    assert tiny.same(weights, expected)


@pytest.mark.parametrize("settings", [{"save": "other"}, {}, {"save": "missing", "finetune": True}], ids=str)
def test_any_other_load_must_hold_a_checkpoint(prefix: Path, tmp_path: Path, settings: dict[str, Any]):
    flags = settings | ({"save": str(tmp_path / settings["save"])} if "save" in settings else {})
    with pytest.raises(ValueError, match=r"--load .*missing is not a folder"):
        check(tiny.config(prefix, load=str(tmp_path / "missing"), **flags), 1)
