"""The Job for Kubernetes: torchrun and the trainer accept its flags, and the numbers of pods, GPUs and seconds agree."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
import yaml

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


def commands(container: dict[str, Any]) -> tuple[Any, list[str]]:
    """What torchrun's own parser makes of a container's arguments: its flags, and those of the trainer."""
    assert container["command"] == ["msamp", "torchrun"]
    assert all(isinstance(word, str) for word in container["args"])
    found = torch.distributed.run.get_args_parser().parse_args(container["args"])
    command, *flags = found.training_script_args
    assert (found.training_script, command) == ("msamp", "pretrain")
    return found, flags


def test_pods_find_each_other_by_the_name_of_the_first(documents, job, train):
    service, pod = documents["Service"], job["template"]["spec"]
    name = documents["Job"]["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    launch, _ = commands(train)
    host, port = launch.rdzv_endpoint.split(":")
    assert host == f"{name}-0.{service['metadata']['name']}"
    assert 1024 < int(port) < 65536
    assert launch.rdzv_backend == "c10d"
    assert launch.max_restarts > 0


def test_as_many_pods_as_nodes_and_as_many_processes_as_gpus(job, train):
    launch, _ = commands(train)
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(launch.nnodes)
    assert train["resources"]["limits"]["nvidia.com/gpu"] == int(launch.nproc_per_node)


@pytest.mark.promise("Clusters", "The Kubernetes Job's flags are valid for the trainer and torchrun.")
def test_the_trainer_takes_its_flags_and_the_grid_fits(train):
    launch, flags = commands(train)
    config: Config = parse_args(flags)
    assert config.checkpoint.resumes_itself  # the same command starts the run and starts it again
    assert config.training.exit_code_unfinished not in (0, 1, 2)
    mounts = {mount["mountPath"] for mount in train["volumeMounts"]}
    files = [*config.data.data_path, config.data.tokenizer_model, config.checkpoint.save]
    assert all(any(file.startswith(f"{mount}/") for mount in mounts) for file in files)
    # The rest of the rules, without the files that stand in the cluster alone.
    here = replace(config, data=DataConfig(), checkpoint=type(config.checkpoint)(), logging=replace(config.logging, dry_run=True))
    check(here, int(launch.nnodes) * int(launch.nproc_per_node))


def test_processes_may_save_before_a_pod_is_killed_and_a_refusal_ends_the_job(job, train):
    pod = job["template"]["spec"]
    seconds = {entry["name"]: entry["value"] for entry in train["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert 30 < int(seconds) < pod["terminationGracePeriodSeconds"]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy wants
    fails = next(rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob")
    assert (fails["containerName"], fails["operator"], fails["values"]) == (train["name"], "In", [2])
