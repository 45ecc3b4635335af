"""`--keep-last 1`: which checkpoints are on the disk from save to save. Kills are in test_folder.py and tests/tools/test_soak.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import checkpoints, tiny
from megatron.lm.checkpoint import Saver, latest
from megatron.lm.checkpoint.files.folder import iteration_folder, iteration_of
from megatron.lm.run.trainer import Trainer


@pytest.fixture
def made(prefix: Path, tmp_path: Path) -> Iterator[Trainer]:
    with tiny.trainer(tiny.config(prefix, opt_level="O2", save=str(tmp_path / "save"))) as made:
        yield made


@pytest.mark.parametrize("background", [False, True], ids=["at-once", "in-background"])
def test_the_only_one_to_keep_goes_when_the_next_is_shown_to_be_sound(made: Trainer, tmp_path: Path, background: bool):
    """Until then a checkpoint is left whatever the steps after it show."""
    training, root = made.training, tmp_path / "save"
    training.config = checkpoints.pointed(training.config, async_save=background, keep_last=1)

    def held() -> list[int | None]:
        return sorted(iteration_of(path) or 0 for path in root.glob("iter_*"))

    with Saver(training) as saver:
        for iteration in (2, 4, 6):
            checkpoints.move(training, iteration)
            saver.save()
        saver.finish()
        assert held() == [4, 6]
        saver.save()  # the same again: no step has shown anything
        saver.finish()
        assert held() == [4, 6]
        for iteration in (7, 8):
            training.health.skipped(iteration, searches_scale=False)
        assert saver.doubt(6)
        assert latest(root) == iteration_folder(root, 4)
        for iteration in (8, 10):  # unhealthy themselves
            checkpoints.move(training, iteration)
            saver.save()
        saver.finish()
        assert latest(root) == iteration_folder(root, 4)
        assert 10 in held()
        checkpoints.move(training, 12)
        training.health.stepped(12, 4.0)
        saver.save()
        checkpoints.move(training, 14)
        saver.save()
    assert held() == [12, 14]
