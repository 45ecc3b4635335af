"""A rehearsal of two nodes on one machine: each is a network namespace with its own address, and a cable joins them. The batch script for
Slurm runs whole, with stand-ins for Slurm's commands, and the launch script meets over the cable: data parallelism over two nodes, by gloo.

What it cannot show: NCCL, a real fabric, hosts with clocks and disks of their own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.lm.checkpoint import iteration_folder
from megatron.lm.checkpoint.files.folder import marked_iteration
from tools import soak

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.nightly(60), pytest.mark.timeout(600)]
NODES = [f"rehearsal{os.getpid()}{side}" for side in "ab"]
ADDRESSES = ["10.213.0.1", "10.213.0.2"]
NAMED_WITHIN = 30.0  # seconds
LAST, EACH = 60, 5
FLAGS = (
    f"--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 "
    f"--train-iters {LAST} --lr 5e-3 --lr-warmup-iters 2 --eval-iters 0 --split 1,0,0 --num-workers 0 "
    "--tokenizer-type NullTokenizer --vocab-size 60 "
    f"--save-interval {EACH} --keep-last 2 --log-interval 1 --distributed-timeout-minutes 0.2"
)
# One task per node, as `srun --ntasks-per-node=1` starts them; a node's task writes to its own log. LATE: seconds that the second waits;
# TASKS: of the step, where one per GPU is expected.
SRUN = """
names=($NODES) pids=() code=0
for i in 0 1; do
  (if ((i)); then sleep "${LATE:-0}"; fi
   export SLURM_STEP_ID=0 SLURM_PROCID=$i SLURM_LOCALID=0 SLURM_NODEID=$i SLURM_STEP_NUM_TASKS=${TASKS:-2} SLURM_STEP_NUM_NODES=2
   echo $BASHPID >"$FAKE/task.$i"
   exec ip netns exec "${names[i]}" env GLOO_SOCKET_IFNAME=cable "${@:3}" >>"$FAKE/node$i.log" 2>&1) &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
"""
COMMANDS = {
    "srun": SRUN,
    "scontrol": 'if [ "$1" = requeue ]; then touch "$FAKE/requeued"; else printf "%s\\n" $HOSTS; fi',
    "scancel": 'kill -TERM $(cat "$FAKE"/task.*)',
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def cable() -> Iterator[None]:
    """Two namespaces and the cable between them."""
    try:
        for node in NODES:
            ip("netns", "add", node)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and iproute2: {error}")
    try:
        ip("link", "add", "cable", "netns", NODES[0], "type", "veth", "peer", "name", "cable", "netns", NODES[1])
        for node, address in zip(NODES, ADDRESSES, strict=True):
            ip("-n", node, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", node, "link", "set", "cable", "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield
    finally:
        for node in NODES:
            ip("netns", "delete", node)


class Job:
    """The batch script as Slurm runs it, on data and into a checkpoint folder below `folder`."""

    def __init__(self, folder: Path, data: Path, **environment: object) -> None:
        self.folder, self.save, began = folder, folder / "save", time.monotonic()
        folder.mkdir(exist_ok=True)
        for name, line in COMMANDS.items():
            (folder / name).write_text(f"#!/bin/bash\n{line}\n", encoding="utf-8")
            (folder / name).chmod(0o755)
        job = {"SLURM_JOB_ID": os.getpid() % 1000, "SLURM_JOB_NODELIST": "two", "SLURM_SUBMIT_DIR": ROOT, "SAVE": self.save, "FAKE": folder}
        ours = {"NODES": " ".join(NODES), "HOSTS": " ".join(ADDRESSES), "NNODES": 2, "GPUS_PER_NODE": 1, "ON_CPU": 1, "DATA": data}
        words = {name: str(value) for name, value in (job | ours | environment).items()}
        path = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"}
        line = ["bash", "examples/slurm/pretrain.sh", "examples/gpt3/pretrain_gpt_125m.sh", *FLAGS.split()]
        with (folder / "batch.log").open("w") as log:
            self.batch = subprocess.Popen(line, cwd=ROOT, env=os.environ | words | path, stdout=log, stderr=log, start_new_session=True)
        self.began = began

    def log(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def until(self, reached: Callable[[], object], seconds: float = 240.0) -> float:
        """Wait for something; return the seconds that it took."""
        began = time.monotonic()
        while not reached():
            assert time.monotonic() - began < seconds, self.log("batch") + self.log("node0")[-3000:] + self.log("node1")[-3000:]
            time.sleep(0.05)
        return time.monotonic() - began

    def trains(self) -> None:
        """Wait until a checkpoint is there and steps follow it."""
        self.until(lambda: re.search(rf"iter +{EACH + 2}/", self.log("node0")))
        assert marked_iteration(self.save) == EACH

    def trainer(self, node: int) -> int:
        """The process of the trainer on a node."""
        here = subprocess.run(["ip", "netns", "pids", NODES[node]], capture_output=True, text=True, check=True).stdout.split()
        lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in here}
        return next(pid for pid, line in lines.items() if b"megatron.lm.pretrain" in line and b"megatron.lm.shell.torchrun" not in line)

    def names(self, node: int) -> bool:
        """Whether a node's log has the error line of its rank."""
        return bool(re.search(rf"^error(: rank| on rank) {node}\b", self.log(f"node{node}"), re.MULTILINE))

    def ends(self) -> int:
        self.until(lambda: self.batch.poll() is not None)
        return self.batch.returncode


@pytest.fixture
def run(cable: None, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(name: str = "job", **environment: object) -> Job:
        jobs.append(Job(tmp_path / name, soak.write_data(tmp_path) if not jobs else tmp_path / "data", **environment))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.batch.poll() is None:
            os.killpg(job.batch.pid, signal.SIGKILL)
    for node in NODES:
        for pid in subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True, check=True).stdout.split():
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(cable: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = Job(folder / "job", soak.write_data(folder))
    assert job.ends() == 0, job.log("node0")[-3000:] + job.log("node1")[-3000:]
    return job.save


def same(job: Job, undisturbed: Path) -> bool:
    return soak.differences(iteration_folder(undisturbed, LAST), iteration_folder(job.save, LAST)) == []


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_process_is_named_on_both_nodes_and_the_run_resumes_with_the_same_bits(node: int, run, undisturbed: Path):
    job = run()
    job.trains()
    os.kill(job.trainer(node), signal.SIGKILL)
    assert job.until(lambda: "attempt 1 of 3 ended" in job.log("batch")) < NAMED_WITHIN
    assert f"rank {node} was ended by SIGKILL" in job.log(f"node{node}")
    assert job.names(1 - node)
    assert job.ends() == 0
    assert same(job, undisturbed)


def test_a_cut_link_is_named_on_both_nodes_and_the_run_resumes_with_the_same_bits(run, undisturbed: Path):
    job = run(ATTEMPTS=4)
    job.trains()
    ip("-n", NODES[1], "link", "set", "cable", "down")
    try:
        job.until(lambda: job.names(0) and job.names(1), NAMED_WITHIN)
    finally:
        ip("-n", NODES[1], "link", "set", "cable", "up")
    assert job.ends() == 0
    assert same(job, undisturbed)


def test_a_node_that_joins_late_is_waited_for_and_one_that_does_not_come_is_named(run, undisturbed: Path):
    job = run(LATE=8)
    assert job.ends() == 0
    assert same(job, undisturbed)
    alone = run("alone", LATE=3600, ATTEMPTS=1, TASKS=4)
    alone.until(lambda: "the 4 processes did not all connect to MASTER_ADDR:MASTER_PORT 10.213.0.1:" in alone.log("node0"), 60.0)


def test_at_the_time_limit_both_nodes_save_and_the_requeued_job_ends_with_the_same_bits(run, undisturbed: Path):
    job = run()
    job.trains()
    os.kill(job.batch.pid, signal.SIGUSR1)
    assert job.until(lambda: job.batch.poll() is not None) < NAMED_WITHIN
    assert (job.batch.returncode, (job.folder / "requeued").exists()) == (0, True)
    assert EACH < (marked_iteration(job.save) or 0) < LAST
    again = run(SLURM_RESTART_COUNT=1)
    assert again.ends() == 0
    assert same(again, undisturbed)
