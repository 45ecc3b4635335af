"""The soak test itself: that it kills when and whom it should, and that it notices every kind of loss."""

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from megatron.lm.checkpoint import iteration_folder
from megatron.lm.checkpoint.files import storage
from megatron.lm.checkpoint.files.folder import digest_entries, marked_iteration, new_partial_folder, publish, write_info
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.files.versions import VERSION
from tools import soak
from tools.soak import Job, Moment, Tally

# A job without training: it goes on from the marker, and publishes a folder an interval. {} is what it says at its start.
FAKE = """
import os, pathlib, sys, time
root = pathlib.Path(sys.argv[1])
root.mkdir(exist_ok=True)
time.sleep(0.02)
caches = root.with_name(root.name + "-index")
caches.mkdir(exist_ok=True)
(caches / "order.npy").touch()
marker = root / "latest_checkpointed_iteration.txt"
at = int(marker.read_text()) if marker.exists() else 0
{}
time.sleep(0.05)
for i in range(at + 2, 25, 2):
    partial = root / f"iter_{{i:07d}}.partial"
    partial.mkdir(exist_ok=True)
    time.sleep(0.02)
    partial.rename(root / f"iter_{{i:07d}}")
    (root / "marker").write_text(str(i))
    (root / "marker").rename(marker)
    for old in root.glob("iter_???????"):
        if int(old.name[5:]) < i - 2:
            old.rmdir()
    time.sleep(0.01)
"""
HONEST = 'print(f"resumed from {root} at iteration {at}" if at else "training starts from scratch", flush=True)'
FORGETFUL = 'print("training starts from scratch", flush=True)'


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replaces training; what a job says at its start can be changed."""
    says = [HONEST]
    monkeypatch.setattr(soak, "command", lambda job, data, folder: [sys.executable, "-c", FAKE.format(says[0]), str(folder)])
    monkeypatch.setattr(soak, "newest_whole", marked_iteration)
    monkeypatch.setattr(soak, "differences", lambda first, second: [])
    return says


def write(root: Path, iteration: int, **tensors: torch.Tensor) -> Path:
    folder = iteration_folder(root, iteration)
    partial = new_partial_folder(folder)
    storage.write(partial, [Item.whole(key, x) for key, x in tensors.items()])
    write_info(partial, {"version": VERSION, "iteration": iteration, "files": digest_entries(partial.iterdir())})
    publish(folder)
    return folder


def test_a_kill_takes_the_whole_family(tmp_path: Path):
    text = "import subprocess, sys, time; "
    text += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "
    text += "print(child.pid, flush=True); time.sleep(600)"
    process = soak.start([sys.executable, "-c", text], tmp_path / "log")
    while not (tmp_path / "log").read_text().endswith("\n"):
        time.sleep(0.02)
    soak.kill(process)
    child = int((tmp_path / "log").read_text())
    assert process.returncode == -9
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    soak.kill(process)  # of one that has gone: nothing


@pytest.mark.parametrize(
    ("says", "said"),
    [
        (FORGETFUL, "iteration None"),
        ("sys.exit(3)", "exit code 3"),
    ],
)
def test_a_run_that_does_not_go_on_is_noticed(tmp_path: Path, fake: list[str], says: str, said: str):
    fake[0] = says
    with pytest.raises(RuntimeError, match=said):
        soak.finish(soak.JOBS[0], tmp_path, tmp_path / "job", [Moment(3, 0.0)], Tally())


def test_a_torn_checkpoint_is_noticed(tmp_path: Path):
    assert soak.newest_whole(tmp_path) is None
    folder = write(tmp_path, 2, w=torch.arange(1000))
    assert soak.newest_whole(tmp_path) == 2
    file = next(folder.glob("*.bin"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        soak.newest_whole(tmp_path)


def test_the_end_must_be_that_of_the_undisturbed(tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    for root in (one, other):
        write(root, soak.ITERATIONS - soak.INTERVAL, w=torch.zeros(3))
        write(root, soak.ITERATIONS, w=torch.ones(3))
    soak.check_end(other, one)
    with pytest.raises(RuntimeError, match="contains iter_0000022, iter_0000024; expected iter_0000024"):
        soak.check_end(other, one, kept=1)
    (other / "iter_0000020.partial").mkdir()
    with pytest.raises(RuntimeError, match="iter_0000020"):
        soak.check_end(other, one)
    (other / "iter_0000020.partial").rmdir()
    write(other, soak.ITERATIONS, w=torch.zeros(3))
    with pytest.raises(RuntimeError, match="undisturbed"):
        soak.check_end(other, one)
    shutil.rmtree(iteration_folder(one, soak.ITERATIONS - soak.INTERVAL))
    soak.check_end(one, one, kept=1)
    with pytest.raises(RuntimeError, match="expected iter_0000022, iter_0000024"):
        soak.check_end(one, one)


@pytest.mark.nightly(90)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", [job for job in soak.JOBS if job.kept == 1], ids=str)
def test_kills_while_the_only_checkpoint_to_keep_is_replaced(tmp_path: Path, job: Job):
    """Of the trainer itself, in its first saves and right after them: `finish` looks for a whole checkpoint after each."""
    data, tally = soak.write_data(tmp_path), Tally()
    moments = [Moment(saves, seconds) for saves, seconds in ((2, 0.0), (1, 0.01), (2, 0.02), (3, 0.05), (1, 0.1))]
    soak.finish(job, data, tmp_path / "job", moments, tally)
    assert tally.kills == len(moments)
    assert soak.newest_whole(tmp_path / "job") == soak.ITERATIONS
    assert len(list((tmp_path / "job").glob("iter_???????"))) == 1
