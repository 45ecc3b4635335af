"""Process groups, the device of this process and its random seeds."""

import contextlib
import gc
import os
import random
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import numpy
import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron.lm.config import Config, ParallelConfig
from megatron.lm.config.cli import settings_by_name
from megatron.lm.config.sections.schema import flag
from megatron.lm.processes import rendezvous
from megatron.lm.processes.cpu_home import enter_cpu_home
from megatron.lm.processes.same_settings import check_same_settings

# Collectives time out this much later than the run's watchdog, which prints first: their own errors do not name a rank.
GRACE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """Rank and number of processes, in the job and on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def launch_from_environment() -> LaunchEnvironment:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them; without any of them there is one process.

    Raises:
        ValueError: if only one of RANK and WORLD_SIZE is set, a value is not an integer, or a rank is out of range.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return LaunchEnvironment()
    rank, world_size = _integer("RANK"), _integer("WORLD_SIZE")
    local_rank, local_world_size = _integer("LOCAL_RANK", default=rank), _integer("LOCAL_WORLD_SIZE", default=world_size)
    for name, value, count_name, count in (
        ("RANK", rank, "WORLD_SIZE", world_size),
        ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size),
    ):
        if not 0 <= value < count:
            raise ValueError(f"{name}={value} must be at least 0 and below {count_name}={count}: {_FIX}")
    return LaunchEnvironment(rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size)


_FIX = "start with `msamp torchrun --nproc-per-node N msamp pretrain ...`, or unset RANK and WORLD_SIZE to train on one process"


def _integer(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        state = "is not set beside it" if text is None else f"is {text!r}"
        raise ValueError(f"{name} {state} but must be an integer: {_FIX}") from None


def device() -> torch.device:
    """Return this process's device: its CUDA device if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def initialize(config: Config) -> None:
    """Create the process groups of the grid, set this process's device and seed every generator.

    An existing default process group is reused. Ranks with the same pipeline stage and tensor shard get the same seed (for dropout; weights
    are drawn by name) whatever their data-parallel rank; stages and shards get different seeds.

    Raises:
        ValueError: if the environment is invalid (`launch_from_environment`), this machine has more processes than GPUs, NCCL has no GPU,
            the number of processes is not a multiple of `ParallelConfig.unit`, or ranks have different settings.
        RunStopped: if the processes do not meet within `--distributed-timeout-minutes`.
    """
    parallel = config.parallel
    launch = launch_from_environment()
    backend, cuda = parallel.distributed_backend, torch.cuda.is_available()
    if backend == "auto":
        backend = "nccl" if cuda else "gloo"
    if backend == "nccl" and not cuda:
        raise ValueError("--distributed-backend nccl requires a CUDA device, but this machine has none: use gloo or auto")
    if launch.world_size % parallel.unit:
        raise ValueError(
            f"{launch.world_size} processes are not a multiple of {parallel.unit}, which the sizes of the grid require "
            f"({', '.join(f'{flag(setting)} {size}' for setting, size in parallel.given.items())}): start one"
        )
    enter_cpu_home()
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if launch.world_size == 1 and loopback is not None:
        # Each of gloo's groups opens a port, also for one process, by default on the host name's address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    set_deterministic(config.training.deterministic)
    if cuda and launch.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK={launch.local_rank} of {launch.local_world_size} processes on this machine, but it has "
            f"{torch.cuda.device_count()} GPUs (one each): start with --nproc-per-node {torch.cuda.device_count()} or fewer"
        )
    if cuda:
        torch.cuda.set_device(launch.local_rank)
        # torch prefers cuDNN from a process's first attention on. Inside `sdpa_kernel`, which restores the former order, this is lost,
        # and attention outside of the trainer uses slower kernels from then on (8 layers of Llama-3-8B in a loop: +11 % per step).
        nothing = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
        torch.nn.functional.scaled_dot_product_attention(nothing, nothing, nothing)
    limit = timedelta(minutes=parallel.distributed_timeout_minutes)
    timeout = limit + timedelta(seconds=GRACE_SECONDS)
    with contextlib.ExitStack() as meeting:
        check = partial(check_same_settings, rank=launch.rank, world_size=launch.world_size, settings=settings_by_name(config))
        if torch.distributed.is_initialized():
            check(torch.distributed.distributed_c10d._get_default_store())
        else:
            meeting.enter_context(rendezvous.deadline(launch.rank, launch.world_size, limit))
            rendezvous.join(backend, launch.rank, launch.world_size, limit, timeout, check)
        create_groups(parallel, parallel.virtual_stages(config.model.num_layers), timeout)
    seed_all(config.training.seed)


def create_groups(parallel: ParallelConfig, virtual_stages: int | None, timeout: timedelta) -> None:
    """Create megatron-core's groups of the grid over the default process group; their collectives end after `timeout`."""
    axes = parallel.axes(torch.distributed.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=axes.tensor,
        pipeline_model_parallel_size=axes.pipeline,
        virtual_pipeline_model_parallel_size=virtual_stages,
        context_parallel_size=axes.context,
        expert_model_parallel_size=axes.expert,
        expert_tensor_parallel_size=axes.expert_tensor,
        distributed_timeout_minutes=timeout / timedelta(minutes=1),
        # The second set of groups over gloo is only for megatron-core's own optimizer checkpoints, and takes seconds to create.
        create_gloo_process_groups=False,
    )


def seed_all(seed: int) -> None:
    """Seed Python, NumPy, torch and megatron-core's tracker of tensor-parallel random numbers."""
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    numpy.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    # The tracker must keep generators: states kept as tensors cannot be set while a CUDA graph is captured.
    model_parallel_cuda_manual_seed(stage_seed, use_cudagraphable_rng=torch.cuda.is_available())


def set_deterministic(wanted: bool) -> None:
    """Turn torch's deterministic kernels on or off; operations without one raise an error.

    Call it before CUDA is first used: cuBLAS reads its workspace size at its start, and a small one makes it sum in a fixed order.
    """
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    # Otherwise torch.empty fills tensors with NaN, which finds reads of uninitialized memory but does not affect the results.
    torch.utils.deterministic.fill_uninitialized_memory = not wanted  # type: ignore[attr-defined]  # a property that mypy does not see


def leave_grid() -> None:
    """Destroy the groups of the grid and megatron-core's buffers; the default process group stays for another `initialize`."""
    parallel_state.destroy_model_parallel()


def shutdown() -> None:
    """Destroy all process groups; do nothing if there are none."""
    # A model in a reference cycle keeps its groups alive, and gloo's threads may abort the process when the interpreter exits.
    gc.collect()
    set_deterministic(False)
    leave_grid()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def device_waits() -> bool:
    """Return whether collectives wait on the device (NCCL), so that a rank gets no error when another rank has failed."""
    return torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend()
