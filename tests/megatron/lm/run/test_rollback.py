"""The way back to a run's own checkpoint, and a run that resumes by itself."""

from pathlib import Path
from typing import Any

import pytest

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


def test_rollbacks_to_one_checkpoint_come_to_an_end(prefix: Path, tmp_path: Path):
    with patched(louder(6)), pytest.raises(RunStopped, match=r"3 rollbacks to iteration 4 in .*--lr.*--loss-spike-threshold"):
        trained(rolling(prefix, tmp_path, train_iters=10))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


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
