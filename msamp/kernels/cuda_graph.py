"""Capture of a CUDA graph, which leaves nothing behind if it fails."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from msamp.kernels import scalar_pool

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def unregistrable() -> str | None:
    """Return why collectives of this process cannot be captured in a CUDA graph, or None if they can.

    NCCL registers the buffers of captured collectives with the other GPUs, which fails for memory of PyTorch's expandable segments. A run
    on two H200s hung at its first graphs; megatron-core refuses the same.
    """
    # The backend of init_process_group() without a name is "undefined", which is NCCL for GPUs: only its config says so.
    if not dist.is_initialized() or dist.get_world_size() == 1 or "nccl" not in str(dist.get_backend_config()):
        return None
    given = {name: os.environ.get(name, "") for name in ALLOCATOR_SETTINGS}
    given["torch.cuda.memory._set_allocator_settings"] = getattr(torch._C, "_accelerator_getAllocatorSettings", str)()
    settings = [name for name, value in given.items() if "expandable_segments:true" in value.lower().replace(" ", "")]
    if not settings or os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return None
    return f"NCCL cannot register buffers with {settings[0]}=expandable_segments:True (set NCCL_GRAPH_REGISTER=0 too)"


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, *, pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Context in which kernels are captured into `graph`, with scalars that it zeroes itself (`scalar_pool.captured`).

    The capture may fail, for example for lack of memory. The error's traceback then keeps `graph`, and NCCL waits at its end for graphs
    with its collectives: the process would not end, and its message would not be seen. So `graph` is reset before the error leaves.

    Args:
        graph: a new graph.
        pool: memory pool of `torch.cuda.graph_pool_handle`; None is a new one.
        stream: to capture on; None is one that `torch.cuda.graph` keeps for captures.
    """
    try:
        # Other threads may use CUDA meanwhile: data loading, writing of checkpoints, NCCL's watchdog.
        with scalar_pool.captured(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except BaseException:
        graph.reset()
        raise
