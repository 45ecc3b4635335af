"""A saver's folder that was used before, or is taken away while it is held."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import checkpoints, tiny
from helpers.checkpoints import MARKER, contents, pointed
from megatron.lm.checkpoint import Saver, latest
from megatron.lm.checkpoint.files import storage
from megatron.lm.checkpoint.files.folder import check_files, read_info
from megatron.lm.checkpoint.files.lock import locked
from megatron.lm.run.trainer import Trainer
from megatron.lm.training.identity import Run


@pytest.fixture(scope="module")
def trainer(prefix: Path) -> Iterator[Trainer]:
    """One for all tests of this file, said to be at iteration 6; saving changes nothing about it."""
    with tiny.trainer(tiny.config(prefix, train_iters=6)) as made:
        checkpoints.move(made.training, 6)
        yield made


@pytest.fixture
def made(trainer: Trainer, tmp_path: Path) -> Trainer:
    """The trainer, that is to save into `tmp_path`/save."""
    trainer.training.config = pointed(trainer.config, save=str(tmp_path / "save"))
    return trainer


def full(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.promise("Checkpoints", "If `--save` cannot be written, the checkpoint goes to `--emergency-save`.")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["nowhere-else", "elsewhere"])
@pytest.mark.parametrize("background", [False, True], ids=["at-once", "in-background"])
def test_a_save_into_a_folder_that_was_taken_away_stops_and_may_go_elsewhere(
    made: Trainer, tmp_path: Path, background: bool, elsewhere: bool
):
    root, other = tmp_path / "save", tmp_path / "elsewhere"
    settings = {"async_save": background, "emergency_save": str(other) if elsewhere else None}
    made.training.config = pointed(made.training.config, **settings)
    said = rf"cannot save to .*iter_0000006: {root}/\.lock was replaced while this job had locked it"
    said += rf".*\. The checkpoint was saved to {other}/iter_0000006 instead" if elsewhere else ""
    with pytest.raises(ValueError, match=said), Saver(made.training) as saver:
        save_after_another_entered(saver, root)
    assert not list(root.glob("iter_*"))
    if elsewhere:
        assert latest(other).name == "iter_0000006"
        check_files(latest(other), read_info(latest(other))["files"])


def save_after_another_entered(saver: Saver, root: Path) -> None:
    (root / ".lock").unlink()
    with locked(root):
        saver.save()
        saver.finish()


def test_where_elsewhere_fails_too_both_are_told(made: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made.training.config = pointed(made.training.config, emergency_save=str(tmp_path / "other"))
    monkeypatch.setattr(storage, "write", full)
    said = r"cannot save to .*save/iter_0000006: .*; and cannot save to .*other/iter_0000006: "
    with pytest.raises(ValueError, match=said), Saver(made.training) as saver:
        saver.save()


@pytest.mark.parametrize("name", ["save", "elsewhere"])
def test_a_folder_of_another_run_is_refused_and_stays(made: Trainer, tmp_path: Path, name: str):
    folder = checkpoints.published(tmp_path / name, 4, **checkpoints.of(Run()))
    made.training.config = pointed(made.training.config, emergency_save=str(tmp_path / "elsewhere"))
    before = contents(folder)
    with pytest.raises(ValueError, match=f"{name} contains another run"), Saver(made.training):
        pass
    assert contents(folder) == before
    with locked(tmp_path / "save"):  # it was left free
        pass


@pytest.mark.promise("Checkpoints", "Remains of an interrupted save are removed at the next start.")
def test_entering_clears_up_what_kills_have_left(made: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = tmp_path / "save"
    checkpoints.published(root, 4, **checkpoints.of(made.training.run))
    (root / "iter_0000099.partial").mkdir()
    (root / MARKER).unlink()
    with Saver(made.training):
        assert sorted(path.name for path in root.iterdir()) == [".lock", "iter_0000004", MARKER]
    said = capsys.readouterr().out
    assert f"deleted {root / 'iter_0000099.partial'} of an interrupted save" in said
    assert f"rewrote {root / MARKER} with iteration 4" in said
