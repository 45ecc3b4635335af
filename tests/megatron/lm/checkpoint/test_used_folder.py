"""A saver's folder that was used before."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import checkpoints, tiny
from helpers.checkpoints import MARKER, contents, pointed
from megatron.lm.checkpoint import Saver
from megatron.lm.checkpoint.files.folder import locked
from megatron.lm.run.trainer import Trainer
from megatron.lm.training.run_record import Run


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
