"""Process groups, the device of this process and its random seeds."""

import contextlib
import gc
import os
import random
from datetime import timedelta

import numpy
import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron.lm.config import Config
from megatron.lm.processes import rendezvous
from megatron.lm.processes.cpu_home import enter_cpu_home
from megatron.lm.processes.environment import LaunchEnvironment, launch_from_environment

# Collectives wait this much longer than the watchdog of a run, so that it speaks first: what they say names no rank.
GRACE_SECONDS = 30.0


def device() -> torch.device:
    """Where this process computes: its CUDA device where there is one, the CPU elsewhere."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def initialize(config: Config) -> None:
    """Join the process groups of data, tensor and pipeline parallelism, take this process's device and seed every generator.

    A default process group that exists already is used as it is. Ranks of one pipeline stage and tensor shard get the same seed (for
    dropout; weights are drawn by name) whatever their data-parallel rank; stages and shards get seeds of their own.

    Raises:
        ValueError: an environment as in `launch_from_environment`, more processes on this machine than GPUs, NCCL without a GPU,
            or a number of processes that tensor x pipeline parallel sizes do not divide.
        RunStopped: the processes have not come together within `--distributed-timeout-minutes`.
    """
    parallel = config.parallel
    launch = launch_from_environment()
    backend = _backend(parallel.distributed_backend)
    model_parallel_size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    if launch.world_size % model_parallel_size:
        raise ValueError(
            f"{launch.world_size} processes are no multiple of tensor x pipeline parallel size {model_parallel_size}: start one"
        )
    enter_cpu_home()
    set_deterministic(config.training.deterministic)
    if torch.cuda.is_available():
        _take_gpu(launch)
    limit = timedelta(minutes=parallel.distributed_timeout_minutes)
    timeout = limit + timedelta(seconds=GRACE_SECONDS)
    with contextlib.ExitStack() as meeting:
        if not torch.distributed.is_initialized():
            meeting.enter_context(rendezvous.deadline(launch.rank, launch.world_size, limit))
            rendezvous.join(backend, launch.rank, launch.world_size, limit, timeout)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual_pipeline_size(config),
            distributed_timeout_minutes=timeout / timedelta(minutes=1),
            # Its second set of groups over gloo serves only megatron-core's own optimizer checkpoints; creating them takes seconds.
            create_gloo_process_groups=False,
        )
    seed_all(config.training.seed)


def virtual_pipeline_size(config: Config) -> int | None:
    """How many model chunks a pipeline stage holds; None without interleaving."""
    layers = config.parallel.num_layers_per_virtual_pipeline_stage
    return config.model.num_layers // config.parallel.pipeline_model_parallel_size // layers if layers else None


def seed_all(seed: int) -> None:
    """Seed Python, NumPy, torch and megatron-core's tracker of tensor-parallel random numbers."""
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    numpy.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    # As generators, which tensor-parallel regions exchange while a CUDA graph is captured; as tensors they could not be set there.
    model_parallel_cuda_manual_seed(stage_seed, use_cudagraphable_rng=torch.cuda.is_available())


def set_deterministic(wanted: bool) -> None:
    """Have torch choose kernels that give the same bits every time, and refuse operations that have none; or not any more.

    Before CUDA is first used: cuBLAS reads how much workspace it may have when it starts, and with less it adds up in one order.
    """
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    # Every torch.empty would be filled with NaN, to find code that reads it unwritten: a hunt for faults, and no part of the arithmetic.
    torch.utils.deterministic.fill_uninitialized_memory = not wanted  # type: ignore[attr-defined]  # a property, for mypy unseen


def leave_grid() -> None:
    """Forget the groups of the grid and megatron-core's buffers for it; the default process group stays, for another `initialize`."""
    parallel_state.destroy_model_parallel()


def shutdown() -> None:
    """Leave all process groups; nothing when there are none."""
    # A model in a reference cycle holds its groups, and gloo's threads, running into the interpreter's end, may abort the process.
    gc.collect()
    set_deterministic(False)
    leave_grid()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def device_waits() -> bool:
    """Whether collectives wait on the device (NCCL), so that a rank whose peer has failed sees no error."""
    return torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend()


def _backend(name: str) -> str:
    cuda = torch.cuda.is_available()
    if name == "nccl" and not cuda:
        raise ValueError("--distributed-backend nccl needs a CUDA device and this machine has none: use gloo or auto")
    return ("nccl" if cuda else "gloo") if name == "auto" else name


def _take_gpu(launch: LaunchEnvironment) -> None:
    gpus = torch.cuda.device_count()
    if launch.local_rank >= gpus:
        raise ValueError(
            f"LOCAL_RANK={launch.local_rank} of {launch.local_world_size} processes here, on a machine of {gpus} GPUs (one a process): "
            f"start with --nproc-per-node {gpus} or fewer"
        )
    torch.cuda.set_device(launch.local_rank)
