"""A run of one process whose data workers send nothing ends after the limit, with a line that names where it stood."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from helpers import tiny
from helpers.megatron_jobs import UNCOMPILED
from megatron.lm.config.cli import to_argv

SECONDS = 280  # a test that hangs is ended by its own limit, and so is the job


def started(prefix: Path, folder: Path, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    settings = tiny.config(
        prefix, train_iters=50_000, num_workers=2, distributed_timeout_minutes=0.25, data_cache_path=str(folder / "index")
    )
    line = ["timeout", "-s", "KILL", str(SECONDS), sys.executable, "-u", "-W", "ignore", "-m", "megatron.lm.pretrain", *to_argv(settings)]
    environment = os.environ | UNCOMPILED
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=before)


def descendants(job: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(job.pid).children(recursive=True)


def ended(job: subprocess.Popen[str], head: str = "") -> str:
    """What a job said until its end, which is an error of the watchdog; no process is left."""
    left = descendants(job)
    try:
        said = head + job.communicate(timeout=SECONDS)[0]
    finally:
        job.kill()
    assert job.returncode == 1, said
    line = next(line for line in said.splitlines() if line.startswith("error: "))
    assert re.match(r"error: the process ends after \d+ s at iteration \d+, reading data \(--distributed-timeout-minutes 0\.25\)", line)
    psutil.wait_procs(left, timeout=20)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in left)
    return line


@pytest.mark.promise("Starting and ending", "A process whose data workers are stuck ends, and its workers with it.")
@pytest.mark.timeout(SECONDS)
def test_stopped_workers(prefix: Path, tmp_path: Path):
    job, lines = started(prefix, tmp_path), ""
    assert job.stdout is not None
    for line in job.stdout:
        lines += line
        if " 3/50000 " in line:
            break
    trainer = next(process for process in descendants(job) if "python" in process.name())
    for worker in trainer.children():
        worker.send_signal(signal.SIGSTOP)
    ended(job, lines)
