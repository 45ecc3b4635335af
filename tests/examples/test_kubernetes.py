"""The Job for Kubernetes: its commands against the parsers, and what it promises of torchrun with two agents on one host."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
import yaml

from helpers import dist, tiny
from megatron.lm.config import Config, DataConfig
from megatron.lm.config.cli import parse_args
from megatron.lm.config.rules.check import check

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples" / "kubernetes" / "pretrain.yaml"


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, Any]]:
    """By kind."""
    return {found["kind"]: found for found in yaml.safe_load_all(FILE.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def job(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return documents["Job"]["spec"]


@pytest.fixture(scope="module")
def train(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["template"]["spec"]["containers"]
    return container


def commands(container: dict[str, Any]) -> tuple[Any, str, list[str]]:
    """What torchrun's own parser makes of a container's arguments: its flags, the module, and the module's flags."""
    assert container["command"] == ["python3", "-m", "megatron.lm.shell.torchrun"]
    assert all(isinstance(word, str) for word in container["args"])
    found = torch.distributed.run.get_args_parser().parse_args(container["args"])
    assert found.module
    return found, found.training_script, found.training_script_args


def test_pods_find_each_other_by_the_name_of_the_first(documents, job, train):
    service, pod = documents["Service"], job["template"]["spec"]
    name = documents["Job"]["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    launch, _, _ = commands(train)
    host, port = launch.rdzv_endpoint.split(":")
    assert host == f"{name}-0.{service['metadata']['name']}"
    assert 1024 < int(port) < 65536
    assert launch.rdzv_backend == "c10d"
    assert launch.max_restarts > 0


def test_as_many_pods_as_nodes_and_as_many_processes_as_gpus(job, train):
    launch, _, _ = commands(train)
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(launch.nnodes)
    assert train["resources"]["limits"]["nvidia.com/gpu"] == int(launch.nproc_per_node)


@pytest.mark.promise("Clusters", "The Kubernetes Job's flags are valid for the trainer and torchrun.")
def test_the_trainer_takes_its_flags_and_the_grid_fits(train):
    launch, module, flags = commands(train)
    assert module == "megatron.lm.pretrain"
    config: Config = parse_args(flags)
    assert config.checkpoint.resumes_itself  # the same command starts the run and starts it again
    assert config.training.exit_code_unfinished not in (0, 1, 2)
    mounts = {mount["mountPath"] for mount in train["volumeMounts"]}
    files = [*config.data.data_path, config.data.tokenizer_model, config.checkpoint.save]
    assert all(any(file.startswith(f"{mount}/") for mount in mounts) for file in files)
    # The rest of the rules, without the files that stand in the cluster alone.
    here = replace(config, data=DataConfig(), checkpoint=type(config.checkpoint)(), logging=replace(config.logging, dry_run=True))
    check(here, int(launch.nnodes) * int(launch.nproc_per_node))


def test_every_pod_checks_its_gpus_before_it_trains(job, train):
    (first,) = job["template"]["spec"]["initContainers"]
    launch, module, flags = commands(first)
    assert launch.standalone
    assert launch.nproc_per_node == commands(train)[0].nproc_per_node
    assert module == "megatron.lm.tools.check_cluster"
    done = subprocess.run(
        [sys.executable, "-m", module, *flags, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_processes_may_save_before_a_pod_is_killed_and_a_refusal_ends_the_job(job, train):
    pod = job["template"]["spec"]
    seconds = {entry["name"]: entry["value"] for entry in train["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert 30 < int(seconds) < pod["terminationGracePeriodSeconds"]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy wants
    fails = next(rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob")
    assert (fails["containerName"], fails["operator"], fails["values"]) == (train["name"], "In", [2])


# Two torchruns, as two pods have them


TOY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --tokenizer-type NullTokenizer "
    "--split 80,15,5 --micro-batch-size 2 --lr 1e-3 --eval-iters 0 --log-interval 1 --opt-level O3 --fp8-min-gain 0 "
    "--distributed-timeout-minutes 5 --train-iters {} --save-interval 20 --keep-last 2"
)


class Pods:
    """Two agents on this host with the flags of the Job: two machines of one process each, and a small model."""

    def __init__(self, container: dict[str, Any], folder: Path, prefix: Path, iterations: int) -> None:
        self.folder, self.save, self.metrics = folder, folder / "save", folder / "metrics.jsonl"
        port = dist.free_port()
        launch = container["args"][: container["args"].index("-m")]
        changed = {"--nnodes": "2", "--nproc-per-node": "1", "--rdzv-endpoint": f"127.0.0.1:{port}"}
        self.launch = [re.sub(r"=.*", f"={changed[name]}", word) if (name := word.split("=")[0]) in changed else word for word in launch]
        self.flags = [
            *shlex.split(TOY.format(iterations)),
            *(word for word in container["args"] if word.startswith("--exit-code-unfinished")),
            *("--save", str(self.save), "--load", str(self.save), "--data-path", str(prefix), "--metrics-file", str(self.metrics)),
        ]
        self.agents: list[subprocess.Popen[bytes] | None] = [None, None]

    def start(self, pod: int) -> None:
        """A pod's container; also again."""
        host = "--rdzv-conf=join_timeout=300,is_host=" + ("1" if pod == 0 else "0")  # what the name of the first pod decides there
        launch = [host if word.startswith("--rdzv-conf") else word for word in self.launch]
        words = [sys.executable, "-m", "megatron.lm.shell.torchrun", *launch, "-m", "megatron.lm.pretrain", *self.flags]
        strange = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        kept = {name: value for name, value in os.environ.items() if name not in strange}
        ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        with (self.folder / "log").open("a") as log:
            self.agents[pod] = subprocess.Popen(words, env=kept | ours, stdout=log, stderr=log, start_new_session=True)

    def agent(self, pod: int) -> subprocess.Popen[bytes]:
        found = self.agents[pod]
        assert found is not None
        return found

    def rows(self) -> list[int]:
        """Iterations that were told."""
        if not self.metrics.is_file():
            return []
        found = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # being written
            found += [row["iteration"]] if row["kind"] == "train" else []
        return found

    def said(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def wait_for(self, done: Callable[[], bool], seconds: float = 200.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, self.said()[-5000:]
            time.sleep(0.1)


@pytest.fixture
def pods(train: dict[str, Any], tmp_path: Path) -> Iterator[Callable[[int], Pods]]:
    made: list[Pods] = []

    def make(iterations: int) -> Pods:
        made.append(Pods(train, tmp_path, tiny.write_data(tmp_path), iterations))
        made[-1].start(0)
        made[-1].start(1)
        return made[-1]

    yield make
    for agent in (agent for one in made for agent in one.agents if agent is not None):
        if agent.poll() is None:
            agent.terminate()
            try:
                agent.wait(60)
            except subprocess.TimeoutExpired:
                agent.kill()


@pytest.mark.promise("Clusters", "One of two torchruns may be killed and return; no iteration is lost or reported twice.")
@pytest.mark.nightly(120)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "evicted"])
def test_a_pod_that_is_lost_comes_back_and_all_go_on(end: signal.Signals, pods: Callable[[int], Pods]):
    both = pods(400)
    both.wait_for(lambda: len(both.rows()) > 30)
    both.agent(1).send_signal(end)
    assert both.agent(1).wait(100) == (-signal.SIGKILL if end == signal.SIGKILL else 128 + signal.SIGTERM)
    before = len(both.rows())
    time.sleep(3)
    assert both.agent(0).poll() is None, both.said()[-5000:]  # it waits for the other
    both.start(1)
    both.wait_for(lambda: both.said().count("resumed from") >= 1, 400)
    assert [both.agent(pod).wait(400) for pod in range(2)] == [0, 0], both.said()[-5000:]
    assert 30 < before < 400
    assert both.rows() == list(range(1, 401))  # what was done twice is told once
    assert both.said().count("training starts from scratch") == 1
