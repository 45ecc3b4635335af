import contextlib
import os
import random
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core import parallel_state
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from helpers import dist
from megatron.lm.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron.lm.processes import process_groups


def config(**parallel: object) -> Config:
    return Config(
        model=ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=2, seq_length=8),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(micro_batch_size=1, train_iters=1, seed=5),
        parallel=ParallelConfig(**parallel),
    )


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


def order_of_attention(first: str) -> list[int]:
    if first == "trainer":
        process_groups.initialize(config())
    x = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16, device=process_groups.device())
    with sdpa_kernel([SDPBackend.MATH], set_priority=True) if first == "trainer" else contextlib.nullcontext():
        scaled_dot_product_attention(x, x, x)
    scaled_dot_product_attention(x, x, x)
    return [int(backend) for backend in torch._C._get_sdp_priority_order()]


@pytest.mark.gpu
def test_attention_outside_of_the_trainer_keeps_torchs_order():
    """torch prefers cuDNN from a process's first attention on. The trainer's is inside `sdpa_kernel`, which restores what was before."""
    assert dist.run(order_of_attention, 1, "trainer", init=False) == dist.run(order_of_attention, 1, "torch", init=False)
