"""A process that does not move ends: by itself, on two processes, and in real jobs that a signal kills or stops."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from helpers import dist, tiny
from megatron.lm.run import watchdog

ROOT = Path(__file__).parents[4]


ALONE = """
import sys, time
from megatron.lm.run.watchdog import Watchdog
watch = Watchdog(1.0)
with watch.watching():
    for _ in range(15):  # longer than the limit in all, and never still for long
        watch.at("in a step", 3)
        time.sleep(0.1)
time.sleep(1.5)  # not watched any more
print("left in peace", flush=True)
watch = Watchdog(1.0)
with watch.watching():
    watch.at("saving", 4)
    time.sleep(60)
"""


ORPHAN = """
import os, sys, time
from megatron.lm.run import watchdog
os.environ["TORCHELASTIC_RUN_ID"] = "1"
watchdog.LAUNCHER_GONE_SECONDS = 3.0
watch = watchdog.Watchdog(16.0)
with watch.watching():
    watch.at("in a step", 4)
    watchdog.os.getppid = lambda: 1
    time.sleep(60)
"""


@pytest.mark.usefixtures("uncompiled")
def test_one_process_is_watched_as_many_and_left_soon_after_its_torchrun_was_killed():
    """An orphan held the GPU for ten minutes, and all later runs on it ran out of memory."""

    def watched(program: str) -> tuple[int, str, str]:
        line = [sys.executable, "-W", "ignore", "-c", program]
        done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
        return done.returncode, done.stdout, done.stderr

    with ThreadPoolExecutor() as pool:
        (code, said, error), (orphans_code, _, orphans_error) = pool.map(watched, (ALONE, ORPHAN))
    assert (code, said) == (1, "left in peace\n")  # by the second, where it hangs
    words = r"^error: the process ends after \d s at iteration 4, saving \(--distributed-timeout-minutes 0\.0166667\): it is stuck, or"
    assert re.search(words, error, re.MULTILINE)
    assert "in <module>" in error  # the traceback
    assert orphans_code == 1
    assert re.search(r"^error: the process ends after \d+ s at iteration 4, in a step \(.*\): torchrun", orphans_error)


def failing(together: bool, kind: type[Exception] = RuntimeError) -> None:
    """Rank 1 raises as if its device waited; rank 0 sleeps, as a host does beside a kernel that waits for ever, or raises too."""
    rank = torch.distributed.get_rank()
    watchdog.device_waits = lambda: True
    if rank == 1 or together:
        watchdog.leave_if_alone(kind(f"a fault of rank {rank}"))
        return
    time.sleep(60)


@pytest.mark.parametrize(
    ("together", "kind", "said"),
    [(False, RuntimeError, "(RuntimeError: a fault of rank 1)"), (True, MemoryError, "out of memory (a fault of rank ")],
    ids=["of one rank", "no memory on any"],  # then each waits for a collective of the other
)
def test_an_error_ends_a_process_at_once_whose_others_wait_on_their_devices(
    together: bool, kind: type[Exception], said: str, capfd: pytest.CaptureFixture[str]
):
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"a process died.*1: 1"):
        dist.run(failing, 2, together, kind)
    assert time.monotonic() - started < 50
    assert said in capfd.readouterr().err


def test_an_error_of_all_ranks_is_left_in_the_usual_way():
    assert dist.run(failing, 2, True) == [None, None]


# Real jobs

FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --tokenizer-type NullTokenizer "
    "--micro-batch-size 2 --lr 1e-3 --eval-iters 0 --split 80,15,5 --log-interval 1 --opt-level O3 --fp8-min-gain 0 "
    "--distributed-timeout-minutes 0.2"
)


class Job:
    """Two processes of the trainer under torchrun."""

    def __init__(self, folder: Path, prefix: Path, flags: list[str], restarts: int) -> None:
        self.save, self.metrics, self.log = folder / "save", folder / "metrics.jsonl", (folder / "log").open("w+")
        files = ["--data-path", str(prefix), "--save", str(self.save), "--load", str(self.save), "--metrics-file", str(self.metrics)]
        command = ["-m", "megatron.lm.pretrain", *FLAGS, *files, *flags]
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        environment = kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        launch = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(dist.free_port())]
        words = ["-m", "torch.distributed.run", *launch, "--max-restarts", str(restarts), *command]
        self.process = subprocess.Popen(
            [sys.executable, *words], env=environment, stdout=self.log, stderr=self.log, text=True, start_new_session=True
        )

    def rank(self, number: int) -> psutil.Process:
        """The process that is this rank now."""
        for found in psutil.Process(self.process.pid).children():
            if found.environ().get("RANK") == str(number):
                return found
        raise AssertionError(f"there is no rank {number}")

    def rows(self) -> list[dict[str, Any]]:
        """Training steps reported so far."""
        lines = self.metrics.read_text().split("\n")[:-1] if self.metrics.exists() else []
        return [row for row in map(json.loads, lines) if row["kind"] == "train"]

    def said(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text()

    def wait_for(self, done: Callable[[], Any], seconds: float = 150.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"it did not come:\n{self.said()[-5000:]}"
            assert self.process.poll() is None, self.said()[-5000:]
            time.sleep(0.05)

    def end(self) -> None:
        for found in psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []:
            found.kill()
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def start(tmp_path: Path, gloo_prefix: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def started(flags: str, restarts: int) -> Job:
        jobs.append(Job(tmp_path, gloo_prefix, shlex.split(flags), restarts))
        return jobs[-1]

    yield started
    for job in jobs:
        job.end()


@pytest.mark.nightly
def test_torchrun_restarts_a_job_whose_rank_was_killed_and_one_whose_rank_was_stopped(start: Callable[..., Job]):
    """First start, two restarts, and the end."""
    job = start("--train-iters 240 --save-interval 20", restarts=2)
    job.wait_for(lambda: len(job.rows()) > 30)
    job.rank(1).send_signal(signal.SIGKILL)
    job.wait_for(lambda: job.said().count("resumed from") == 1)
    before = len(job.rows())
    job.wait_for(lambda: len(job.rows()) > before + 30)
    job.rank(1).send_signal(signal.SIGSTOP)
    job.wait_for(lambda: "error: rank 0 ends after" in job.said())
    job.wait_for(lambda: job.said().count("resumed from") == 2)  # torchrun gives the stopped process 30 s to end
    assert job.process.wait(200) == 0, job.said()[-5000:]
    assert job.said().count("training starts from scratch") == 1
    assert [row["iteration"] for row in job.rows()] == list(range(1, 241))  # what was done twice is told once
    assert tiny.losses(job.rows())[-1] < tiny.losses(job.rows())[0]


@pytest.mark.promise("Clusters", "Processes save and exit after their torchrun was killed.")
@pytest.mark.nightly(40)
def test_processes_whose_torchrun_was_killed_save_and_leave(start: Callable[..., Job]):
    job = start("--train-iters 100000", restarts=0)
    job.wait_for(lambda: len(job.rows()) > 5)
    ranks = [job.rank(number) for number in range(2)]
    job.process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    for process in alive:
        process.kill()
    assert not alive
    assert ", saved: torchrun, which started this, is gone" in job.said()
    assert (job.save / "latest_checkpointed_iteration.txt").is_file()
