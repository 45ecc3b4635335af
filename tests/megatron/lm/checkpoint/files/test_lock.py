"""One job in a folder of checkpoints: a second one is refused."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megatron.lm.checkpoint.files.folder import locked


def hold(root: Path, told: Connection, forks: bool) -> None:
    """Another job: holds the folder until it is killed."""
    with locked(root):
        if forks and not os.fork():
            time.sleep(60)  # what a worker of the data loader does after the death of its trainer, for some seconds
            os._exit(0)
        told.send(True)
        time.sleep(60)


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with-workers"])
def test_the_second_job_in_a_folder_is_refused_until_the_first_is_gone(tmp_path: Path, forks: bool):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    other = context.Process(target=in_own_group, args=(tmp_path / "save", there, forks))
    other.start()
    try:
        assert here.poll(30)
        said = f"is in use by process {other.pid} on .*two jobs in one folder would lose checkpoints: stop it, or choose another --save"
        with pytest.raises(ValueError, match=said), locked(tmp_path / "save"):
            pass
        assert other.pid is not None
        os.kill(other.pid, signal.SIGKILL)
        other.join()
        with locked(tmp_path / "save"):
            assert f"process {os.getpid()} on" in (tmp_path / "save" / ".lock").read_text()
    finally:
        os.killpg(other.pid, signal.SIGKILL) if forks else other.kill()
        other.join()
    with locked(tmp_path / "save"):  # free again, whoever held it last
        pass


def in_own_group(root: Path, told: Connection, forks: bool) -> None:
    os.setpgid(0, 0)
    hold(root, told, forks)


@pytest.mark.parametrize("what", ["below a file", "is a file"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, what: str):
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "save" if what == "below a file" else tmp_path / "file"
    with pytest.raises(ValueError, match=r"cannot be written"), locked(root):
        pass
