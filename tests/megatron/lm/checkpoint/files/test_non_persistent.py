"""The folder of non-persistent checkpoints beside `--save`, and which of both a start takes."""

from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import of, published
from megatron.lm.checkpoint.files import non_persistent
from megatron.lm.checkpoint.files.folder import iteration_folder, read_info
from megatron.lm.checkpoint.loading import newest
from megatron.lm.config import CheckpointConfig
from megatron.lm.training.run_record import Run

RUN = Run()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with persistent checkpoints of 10 and 20, and a non-persistent one of 25."""
    for iteration in (10, 20):
        published(tmp_path, iteration, **of(RUN))
    published(tmp_path / "non_persistent", 25, **of(RUN))
    return tmp_path


def settings(root: Path, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(load=str(root), save=str(root), **{"non_persistent_save_interval": 5} | more)


def offered(settings: CheckpointConfig) -> list[int]:
    return [read_info(folder)["iteration"] for folder in non_persistent.candidates_of(settings).folders]


def test_the_newer_of_both_folders_comes_first(root: Path):
    assert offered(settings(root)) == [25, 20, 10]
    published(root, 30, **of(RUN))
    assert offered(settings(root)) == [30, 25, 20, 10]
    assert newest(settings(root)) == iteration_folder(root, 30)


def test_a_named_iteration_is_found_in_either(root: Path):
    assert offered(settings(root, ckpt_step=25)) == [25]
    assert offered(settings(root, ckpt_step=10)) == [10]
    with pytest.raises(ValueError, match="has no checkpoint of iteration 7"):
        newest(settings(root, ckpt_step=7))


def test_a_damaged_one_is_passed_over_for_an_older_one_of_the_other_folder(root: Path):
    (root / "non_persistent" / "iter_0000025" / "checkpoint.json").write_text("{")
    assert newest(settings(root)) == iteration_folder(root, 20)


def test_what_the_run_went_back_behind_is_deleted(root: Path):
    assert non_persistent.forget(root / "non_persistent", 25) == []
    lines = non_persistent.forget(root / "non_persistent", 20)
    assert lines == [f"deleted {root}/non_persistent/iter_0000025: the run went back to iteration 20"]
    assert offered(settings(root)) == [20, 10]
