"""Logs that cannot be written cost what is lacking in them and nothing else; those of a restart tell every iteration once."""

import contextlib
import json
import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers import tiny
from megatron.lm.config import LATEST_CHECKPOINT_FILE
from megatron.lm.shell.logs import LogFile, Unwritten, cut_after
from megatron.lm.shell.progress import Progress

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a system without /dev/full")


@contextlib.contextmanager
def space_up_to(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes: a write that would is cut off, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.promise("Starting and ending", "A write that does not fit leaves no torn line.")
def test_a_write_that_does_not_fit_leaves_no_torn_line_and_later_ones_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    unwritten = Unwritten()
    path = tmp_path / "new" / "m.jsonl"
    file = LogFile(path, "--metrics-file m", unwritten)
    file.write(b"x" * (1 << 20) + b"\n")
    assert unwritten.describe() is None
    with space_up_to((1 << 20) + 10):
        file.write(b'{"iteration": 1}\n')
        file.write(b'{"iteration": 2}\n')
    file.write(b'{"iteration": 3}\n')
    file.close()
    assert path.read_bytes() == b"x" * (1 << 20) + b'\n{"iteration": 3}\n'
    assert unwritten.describe() == "2 of --metrics-file m"
    assert capsys.readouterr().err.count("--metrics-file m cannot be written") == 1


def curve(folder: Path) -> dict[int, float]:
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    points = read.Scalars("train/loss")
    assert len({point.step for point in points}) == len(points)
    return {point.step: point.value for point in points}


@pytest.mark.promise("Starting and ending", "A full disk under logs and metrics costs their lines, not the run.")
@needs_full
def test_a_run_whose_logs_are_full_trains_to_its_end_and_saves(tmp_path: Path, prefix: Path, capsys: pytest.CaptureFixture[str]):
    settings: dict[str, Any] = {"opt_level": "O2", "train_iters": 2, "save": str(tmp_path / "save")}
    with tiny.trainer(tiny.config(prefix, metrics_file="/dev/full", record_precision="/dev/full", **settings)) as made:
        made.run()
    assert (tmp_path / "save" / "iter_0000002").is_dir()
    said = capsys.readouterr().err
    assert "failed log writes: 4 of --metrics-file /dev/full, 1 of --record-precision /dev/full\n" in said


@pytest.mark.promise("Starting and ending", "A resumed run has every iteration once in metrics, record and TensorBoard.")
def test_a_run_that_goes_on_from_its_checkpoint_tells_every_iteration_once(tmp_path: Path, prefix: Path):
    save, file = tmp_path / "save", tmp_path / "m.jsonl"
    settings: dict[str, Any] = {"save": str(save), "load": str(save), "save_interval": 2, "metrics_file": str(file)}
    settings["tensorboard_dir"] = str(tmp_path / "events")
    first = tiny.run(tiny.config(prefix, train_iters=4, **settings))
    # A kill after iteration 4, and before its checkpoint.
    shutil.rmtree(save / "iter_0000004")
    (save / LATEST_CHECKPOINT_FILE).write_text("2")
    second = tiny.run(tiny.config(prefix, train_iters=4, lr_decay_iters=4, **settings))
    assert [row["iteration"] for row in second if row["kind"] == "train"] == [1, 2, 3, 4]
    assert [row["kind"] for row in second].count("precision") == 2
    assert tiny.losses(second) == tiny.losses(first)
    assert list(curve(tmp_path / "events").values()) == pytest.approx(tiny.losses(first))


def rows(*told: int | str) -> bytes:
    return b"".join(json.dumps({"kind": one} if isinstance(one, str) else {"iteration": one}).encode() + b"\n" for one in told)


@pytest.mark.parametrize(
    ("before", "iteration", "after"),
    [
        (rows("precision", 1, 2, 3, 4), 2, rows("precision", 1, 2)),
        (rows("precision", 1, 2), 2, rows("precision", 1, 2)),
        (rows("precision", 1, 2, 3) + b'{"iteration": 4, "los', 2, rows("precision", 1, 2)),
        (rows("precision", 1, 2) + b'{"iteration": 3, "los', 3, rows("precision", 1, 2)),
        # rolled back from 5 to 2: what comes last counts
        (rows("precision", 1, 2, 3, 4, 5, 3, 4, 5), 4, rows("precision", 1, 2, 3, 4, 5, 3, 4)),
        # another run before, and nothing told of this one before its checkpoint
        (rows("precision", 100, 200, "precision", 100), 50, rows("precision", 100, 200, "precision")),
        (rows(100, 200), 50, rows(100, 200)),
        (b"", 5, b""),
    ],
)
def test_what_a_restart_will_tell_again_is_cut(tmp_path: Path, before: bytes, iteration: int, after: bytes):
    path = tmp_path / "m.jsonl"
    path.write_bytes(before)
    cut_after(path, iteration)
    assert path.read_bytes() == after


def test_progress_says_what_is_done(capsys: pytest.CaptureFixture[str]):
    with Progress("to-hf checkpoints", first=0.02, seconds=0.02) as progress:
        assert sum(progress.counted(range(4), 8, "tensors")) == 6
        time.sleep(0.2)
    assert capsys.readouterr().err.splitlines()[-1].startswith("to-hf checkpoints: 4 of 8 tensors (50 %), 0 s")
