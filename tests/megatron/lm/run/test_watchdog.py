"""Who is stuck: the judgement by itself, on two processes, and in real jobs that a signal kills or stops."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from helpers import dist, tiny
from megatron.lm.run import watchdog
from megatron.lm.run.watchdog import READING, Watchdog, Whereabouts, verdict

ROOT = Path(__file__).parents[4]


def place(iteration: int, phase: str = "in a step", ago: float = 1.0, waits: bool = False) -> Whereabouts:
    return Whereabouts(iteration, phase, 60.0, 1000.0 - ago, waits)


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        (
            {0: place(5), 1: place(5, ago=58.0), 2: place(5)},
            "rank 1 is stuck; rank 1 at iteration 5, in a step, waiting for no rank, for 60 s; last report 58 s ago",
        ),
        ({0: place(5), 2: place(5)}, "rank 1 is stuck; rank 1 has never reported its position; ranks 0, 2 at iteration 5, in a step"),
        (
            {0: place(5), 1: place(5, READING), 2: place(5)},
            "rank 1 is stuck; rank 1 at iteration 5, reading data, waiting for no rank, for 60 s",
        ),
        (
            {0: place(6), 1: place(5, "saving"), 2: place(6)},
            "rank 1 is stuck; rank 1 at iteration 5, saving, waiting for no rank, for 60 s",
        ),
        ({0: place(6), 1: place(5), 2: place(5)}, "ranks 1-2 are stuck"),
        (
            {0: place(5, waits=True), 1: place(5), 2: place(5, waits=True)},
            "rank 1 is stuck; rank 1 at iteration 5, in a step, waiting for no rank, for 60 s",
        ),
        ({0: place(5, waits=True), 1: place(5, waits=True), 2: place(5, waits=True)}, "no rank is behind the others"),
        ({0: place(5), 1: place(5), 2: place(5)}, "no rank is behind the others; ranks 0-2 at iteration 5, in a step"),
    ],
)
def test_the_judgement(places: dict[int, Whereabouts], wanted: str):
    assert verdict(places, 3, 60.0, now=1000.0).startswith(wanted)


ALONE = """
import sys, time
from megatron.lm.run.watchdog import Watchdog
watch = Watchdog(2.0, 0, 1)
with watch.watching():
    for _ in range(30):  # longer than the limit in all, and never still for long
        watch.at("in a step", 3)
        time.sleep(0.1)
time.sleep(3)  # not watched any more
print("left in peace", flush=True)
watch = Watchdog(2.0, 0, 1)
with watch.watching():
    watch.at("saving", 4)
    time.sleep(60)
"""


@pytest.mark.usefixtures("uncompiled")
def test_one_process_is_watched_as_many():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "left in peace\n")  # by the second, where it hangs
    words = r"^error: the process ends after \d s at iteration 4, saving \(--distributed-timeout-minutes 0\.0333333\): it is stuck, see the"
    assert re.search(words, done.stderr, re.MULTILINE)
    assert "in <module>" in done.stderr  # the traceback


ORPHAN = """
import os, sys, time
from megatron.lm.run import watchdog
os.environ["TORCHELASTIC_RUN_ID"] = "1"
watchdog.LAUNCHER_GONE_SECONDS = 3.0
watch = watchdog.Watchdog(16.0, 0, 1)
with watch.watching():
    watch.at(sys.argv[1], 4)
    time.sleep(float(sys.argv[2]))
    watchdog.os.getppid = lambda: 1
    time.sleep(float(sys.argv[3]))
print("left in peace")
"""


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("phase", "before", "after"), [("in a step", 0.0, 8.0), ("in a step", 5.0, 1.5), ("saving", 0.0, 8.0)])
def test_a_step_that_does_not_end_is_left_soon_after_torchrun_was_killed(phase: str, before: float, after: float):
    """It held the GPU for ten minutes, and all later runs on it ran out of memory. A save may take its time, and a step that was long
    before torchrun died ends, so that it can be saved."""
    line = [sys.executable, "-W", "ignore", "-c", ORPHAN, phase, str(before), str(after)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    if after < 8 or phase == "saving":
        assert (done.returncode, done.stdout) == (0, "left in peace\n")
        return
    assert done.returncode == 1
    assert re.search(
        r"^error: the process ends after \d s at iteration 4, in a step \(.*\): torchrun, which started this, is gone", done.stderr
    )


def test_the_error_of_another_rank_is_told_where_torchrun_is_gone_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    watch = Watchdog(16.0, 0, 2)
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert watch._cause() == "torchrun, which started this, is gone"
    watch._verdict = "rank 1 failed in a step at iteration 4: OutOfMemoryError: no memory"
    assert watch._cause() == f"torchrun, which started this, is gone; {watch._verdict}"


@pytest.mark.parametrize(
    ("file", "name", "waits"), [("distributed_c10d.py", "main", True), ("step.py", "main", False), ("distributed_c10d.py", "save", False)]
)
def test_where_a_thread_is_tells_whether_it_waits(file: str, name: str, waits: bool):
    """A hook of backward waits in a thread of its own; what a save in the background waits for is not this step."""
    held = threading.Lock()
    held.acquire()
    found: dict[str, Any] = {"wait": held.acquire}
    exec(compile("def hang():\n    wait()\n", f"torch/distributed/{file}", "exec"), found)
    thread = threading.Thread(target=found["hang"], name=name, daemon=True)
    thread.start()
    time.sleep(0.05)
    assert Watchdog(1.0, 0, 2)._here().waits == waits
    held.release()
    thread.join()


def spinning(phase: str) -> None:
    rank = torch.distributed.get_rank()
    watchdog = Watchdog(1.5, rank, 2)
    with watchdog.watching():
        for _ in range(12):  # longer than the limit in all, and never still for long
            watchdog.at("in a step", 6)
            time.sleep(0.2)
        watchdog.at("in a step", 7)
        if rank == 1:
            watchdog.at(phase)
            while True:
                pass
        torch.distributed.all_reduce(torch.ones(1))


@pytest.mark.promise("Starting and ending", "A rank that hangs inside a step is named by the others.")
@pytest.mark.nightly
@pytest.mark.parametrize("phase", [READING, "in a step"])
def test_a_rank_that_spins_is_named_by_all_and_all_end(phase: str, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(RuntimeError, match=r"a process died.*\{0: 1, 1: 1\}"):
        dist.run(spinning, 2, phase)
    said = capfd.readouterr().err
    for rank in range(2):
        assert f"error: rank {rank} ends after " in said
    assert said.count(f"rank 1 is stuck; rank 1 at iteration 7, {phase}, waiting for no rank, for ") == 2  # not before, while they moved
    assert "in spinning" in said  # the line that spins, from the traceback


def failing(together: bool, kind: type[Exception] = RuntimeError) -> None:
    """Rank 1 raises as if its device waited; rank 0 sleeps, as a host does beside a kernel that waits for ever, or raises too."""
    rank = torch.distributed.get_rank()
    watch = Watchdog(4.0, rank, 2)
    watchdog.device_waits = lambda: True
    with watch.watching():
        watch.at("in a step", 7)
        if rank == 1 or together:
            try:
                raise kind(f"a fault of rank {rank}")
            except kind as error:
                watch.leave_if_alone(error)
                return
        time.sleep(60)


def test_an_error_of_one_rank_is_said_first_and_ends_the_others_which_wait_on_their_devices(capfd: pytest.CaptureFixture[str]):
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"a process died.*\{0: 1, 1: 1\}|a process died.*\{0: -9, 1: 1\}"):
        dist.run(failing, 2, False)
    said = capfd.readouterr().err
    assert time.monotonic() - started < 30
    assert "this is a bug of the program, please report it (RuntimeError: a fault of rank 1)" in said
    assert "rank 0 ends after " in said
    assert "rank 1 failed in a step at iteration 7: RuntimeError: a fault of rank 1" in said


def test_an_error_of_all_ranks_is_left_in_the_usual_way():
    assert dist.run(failing, 2, True) == [None, None]


def test_ranks_that_all_lack_memory_leave_at_once_since_each_waits_for_a_collective_of_the_other(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(RuntimeError, match=r"a process died.*1: 1"):
        dist.run(failing, 2, True, MemoryError)
    assert "out of memory (a fault of rank " in capfd.readouterr().err


# Real jobs

FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --tokenizer-type NullTokenizer "
    "--micro-batch-size 2 --lr 1e-3 --eval-iters 0 --split 80,15,5 --log-interval 1 --opt-level O3 --fp8-min-gain 0 "
    "--distributed-timeout-minutes 0.2"
)


class Job:
    """Two processes of the trainer, under torchrun or by themselves."""

    def __init__(self, folder: Path, prefix: Path, flags: list[str], restarts: int | None) -> None:
        self.save, self.metrics, self.log = folder / "save", folder / "metrics.jsonl", (folder / "log").open("w+")
        port = str(dist.free_port())
        files = ["--data-path", str(prefix), "--save", str(self.save), "--load", str(self.save), "--metrics-file", str(self.metrics)]
        command = ["-m", "megatron.lm.pretrain", *FLAGS, *files, *flags]
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        self.environment = kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        if restarts is not None:
            launch = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
            self.processes = [self._start(["-m", "torch.distributed.run", *launch, "--max-restarts", str(restarts), *command])]
        else:
            shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.processes = [self._start(command, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(2)]

    def _start(self, command: list[str], **changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command],
            env=self.environment | changes,
            stdout=self.log,
            stderr=self.log,
            text=True,
            start_new_session=True,
        )

    def rank(self, number: int) -> psutil.Process:
        """The process that is this rank now."""
        for process in self.processes:
            for found in [psutil.Process(process.pid), *psutil.Process(process.pid).children()]:
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
            assert any(process.poll() is None for process in self.processes), self.said()[-5000:]
            time.sleep(0.05)

    def end(self) -> None:
        for process in self.processes:
            for found in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
                found.kill()
            process.kill()
            process.wait()
        self.log.close()


@pytest.fixture
def start(tmp_path: Path, gloo_prefix: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def started(flags: str, restarts: int | None = None) -> Job:
        jobs.append(Job(tmp_path, gloo_prefix, shlex.split(flags), restarts))
        return jobs[-1]

    yield started
    for job in jobs:
        job.end()


@pytest.mark.nightly
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_and_the_other_ends(start: Callable[..., Job], stopped: int):
    """Rank 0 holds the store where nobody launches: stopped, it is what does not answer."""
    job = start("--train-iters 100000")
    job.wait_for(lambda: len(job.rows()) > 5)
    job.rank(stopped).send_signal(signal.SIGSTOP)
    survivor = job.processes[1 - stopped]
    job.wait_for(lambda: survivor.poll() is not None, 100)
    assert survivor.returncode == 1
    line = next(line for line in job.said().splitlines() if line.startswith("error: rank"))
    assert line.startswith(f"error: rank {1 - stopped} ends after ")
    assert 12 <= int(line.split()[5]) <= 12 + 30  # before the collective's own timeout
    assert "--distributed-timeout-minutes 0.2" in line
    if stopped == 1:
        assert "rank 1 is stuck; rank 1 at iteration " in line
        assert "; last report " in line
    else:
        assert "the rendezvous store does not respond: rank 0, which hosts it, is dead or stopped" in line


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
    job.wait_for(lambda: "rank 1 is stuck" in job.said())
    job.wait_for(lambda: job.said().count("resumed from") == 2)  # torchrun gives the stopped process 30 s to end
    (process,) = job.processes
    assert process.wait(200) == 0, job.said()[-5000:]
    assert job.said().count("training starts from scratch") == 1
    assert [row["iteration"] for row in job.rows()] == list(range(1, 241))  # what was done twice is told once
    assert tiny.losses(job.rows())[-1] < tiny.losses(job.rows())[0]


@pytest.mark.promise("Clusters", "Processes save and exit after their torchrun was killed.")
@pytest.mark.nightly(40)
def test_processes_whose_torchrun_was_killed_save_and_leave(start: Callable[..., Job]):
    job = start("--train-iters 100000", restarts=0)
    job.wait_for(lambda: len(job.rows()) > 5)
    ranks = [job.rank(number) for number in range(2)]
    job.processes[0].kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    for process in alive:
        process.kill()
    assert not alive
    assert ", saved: torchrun, which started this, is gone" in job.said()
    assert (job.save / "latest_checkpointed_iteration.txt").is_file()
