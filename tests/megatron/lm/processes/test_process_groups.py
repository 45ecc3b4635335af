import os
import random
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core import parallel_state

from helpers import dist
from megatron.lm.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron.lm.processes import process_groups
from megatron.lm.processes.environment import LaunchEnvironment


def config(**parallel: object) -> Config:
    return Config(
        model=ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=2, seq_length=8),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(micro_batch_size=1, train_iters=1, seed=5),
        parallel=ParallelConfig(**parallel),
    )


def test_more_processes_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"LOCAL_RANK=2 of 3 processes.*2 GPUs.*--nproc-per-node 2"):
        process_groups._take_gpu(LaunchEnvironment(rank=2, world_size=3, local_rank=2, local_world_size=3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_nccl_without_a_gpu_is_refused(alone: None):
    with pytest.raises(ValueError, match=r"nccl requires a CUDA device.*gloo"):
        process_groups.initialize(config(distributed_backend="nccl"))
    assert not torch.distributed.is_initialized()


def test_sizes_that_do_not_divide_the_world_are_refused(alone: None):
    with pytest.raises(
        ValueError, match=r"1 processes are not a multiple of 2, .*--tensor-model-parallel-size 2, --pipeline-model-parallel-size 1"
    ):
        process_groups.initialize(config(tensor_model_parallel_size=2))
    assert not torch.distributed.is_initialized()


def draw() -> tuple[float, float, list[float]]:
    return random.random(), float(numpy.random.rand()), torch.rand(2).tolist()


def test_one_process_without_torchrun(alone: None):
    process_groups.initialize(config())
    first = draw()
    assert torch.distributed.get_world_size() == 1
    assert parallel_state.get_data_parallel_world_size() == 1
    assert process_groups.device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    torch.distributed.barrier()
    process_groups.seed_all(5)
    assert draw() == first
    process_groups.seed_all(6)
    assert draw() != first
    process_groups.shutdown()
    assert not torch.distributed.is_initialized()
    process_groups.shutdown()  # a second time is harmless


def test_deterministic_lasts_as_long_as_the_groups(alone: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    settings = config()
    process_groups.initialize(replace(settings, training=replace(settings.training, deterministic=True)))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    process_groups.shutdown()
    assert not torch.are_deterministic_algorithms_enabled()


def groups_of_two() -> list[tuple[int, int, int, float]]:
    """From torchrun's variables alone: sizes of (DP, TP, PP) and the first random number, for three layouts."""
    seen = []
    for sizes in ({}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}):
        process_groups.initialize(config(**sizes, distributed_backend="gloo"))
        x = torch.ones(1, device=process_groups.device())
        torch.distributed.all_reduce(x)
        assert x.item() == 2
        seen.append(
            (
                parallel_state.get_data_parallel_world_size(),
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_pipeline_model_parallel_world_size(),
                torch.rand(1).item(),
            )
        )
        process_groups.leave_grid()
    process_groups.shutdown()
    return seen


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on one GPU")
def test_two_processes():
    first, second = dist.run(groups_of_two, 2, init=False)
    assert [sizes[:3] for sizes in first] == [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
    equal_draws = [a[3] == b[3] for a, b in zip(first, second, strict=True)]
    assert equal_draws == [True, True, False]  # pipeline stages hold different layers: they draw their own numbers


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's list of sockets")
def test_one_process_listens_on_the_loopback_interface_alone(alone: None, monkeypatch: pytest.MonkeyPatch):
    """gloo opens a port for each group, by default on the address of the host's name."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    process_groups.initialize(config())
    mine = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    heard = [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    assert heard
    assert set(heard) <= {"0100007F", "00000000000000000000000001000000"}
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo"), "whatever the host's name leads to"
