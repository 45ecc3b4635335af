"""A saver's folder that was used before, or is taken away while it is held."""

import contextlib
import errno
import multiprocessing
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


@contextlib.contextmanager
def locked_by_another(root: Path) -> Iterator[None]:
    """Another process holds the lock during the block."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def hold() -> None:
        with locked(root):
            there.send("locked")
            there.recv()

    other = context.Process(target=hold)
    other.start()
    here.recv()
    yield
    here.send("leave")
    other.join()


@pytest.mark.parametrize("background", [False, True], ids=["at-once", "in-background"])
@pytest.mark.parametrize("busy", [False, True], ids=["another-has-written", "another-writes"])
def test_an_emergency_folder_of_another_run_gets_a_folder_for_each_run(made: Trainer, tmp_path: Path, busy: bool, background: bool):
    root, other = tmp_path / "save", tmp_path / "elsewhere"
    made.training.config = pointed(made.training.config, emergency_save=str(other), async_save=background)
    own = other / f"run_{made.training.run.id[:12]}" / "iter_0000006"
    with contextlib.ExitStack() as held:
        if busy:
            held.enter_context(locked_by_another(other))
        else:
            checkpoints.published(other, 6, **checkpoints.of(Run()))
        before = contents(other)
        why = "is in use by process" if busy else "contains another run"
        with (
            pytest.raises(ValueError, match=rf"The checkpoint was saved to {own} instead, since .*{other} {why}"),
            Saver(made.training) as saver,
        ):
            save_after_another_entered(saver, root)
        assert contents(other).items() >= before.items()
    check_files(own, read_info(own)["files"])


def test_an_emergency_folder_that_cannot_be_written_is_named(made: Trainer, tmp_path: Path):
    (tmp_path / "file").touch()
    made.training.config = pointed(made.training.config, emergency_save=str(tmp_path / "file" / "folder"))
    said = (
        rf"cannot save to .*save/iter_0000006: .*; and --emergency-save {tmp_path}/file/folder/run_.* cannot be written \(Not a directory"
    )
    with pytest.raises(ValueError, match=said), Saver(made.training) as saver:
        save_after_another_entered(saver, tmp_path / "save")


def test_a_folder_of_another_run_is_refused_and_stays(made: Trainer, tmp_path: Path):
    folder = checkpoints.published(tmp_path / "save", 4, **checkpoints.of(Run()))
    before = contents(folder)
    with pytest.raises(ValueError, match="save contains another run"), Saver(made.training):
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
