"""Two runs share `--emergency-save`, lose their `--save`, and are told to leave: neither loses its checkpoint to the other."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import tiny
from helpers.megatron_jobs import UNCOMPILED
from megatron.lm.checkpoint.files.folder import check_files, read_info
from megatron.lm.config.cli import to_argv

SECONDS = 240


def started(prefix: Path, folder: Path, name: str) -> subprocess.Popen[str]:
    settings = tiny.config(
        prefix,
        opt_level="O2",
        train_iters=5000,
        save=str(folder / name),
        emergency_save=str(folder / "emergency"),
        data_cache_path=str(folder / f"{name}-index"),
    )
    line = [sys.executable, "-u", "-W", "ignore", "-m", "megatron.lm.pretrain", *to_argv(settings)]
    return subprocess.Popen(line, env=os.environ | UNCOMPILED, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def said_until(job: subprocess.Popen[str], words: str) -> None:
    """Read what a job prints, up to a line with these words."""
    assert job.stdout is not None
    lines = []
    for line in job.stdout:
        lines.append(line)
        if words in line:
            return
    pytest.fail("".join(lines))


@pytest.mark.promise("Checkpoints", "Runs may share `--emergency-save`: none replaces the checkpoint of another.")
@pytest.mark.nightly(30)  # by default without runs: test_used_folder.py of megatron/lm/checkpoint
@pytest.mark.parametrize("gap", [0.0, 5.0], ids=["at the same time", "one after the other"])
@pytest.mark.timeout(SECONDS)
def test_both_checkpoints_survive(prefix: Path, tmp_path: Path, gap: float):
    jobs = [started(prefix, tmp_path, name) for name in ("a", "b")]
    try:
        for job in jobs:
            said_until(job, " 2/5000 ")
        for name in ("a", "b"):
            shutil.rmtree(tmp_path / name)
        for job in jobs:
            job.send_signal(signal.SIGTERM)
            time.sleep(gap)
        said = [job.communicate(timeout=SECONDS / 2)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    places = [re.search(r"The checkpoint was saved to (\S+) instead", text) for text in said]
    assert all(places), said
    folders = [Path(place[1]) for place in places if place]
    assert len(set(folders)) == 2
    for folder in folders:
        check_files(folder, read_info(folder)["files"])
    runs = [read_info(folder)["run"]["id"] for folder in folders]
    assert runs[0] != runs[1]
    assert sum("contains another run" in text or "is in use by" in text for text in said) == 1
