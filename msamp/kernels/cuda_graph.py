"""Capture of a CUDA graph, which leaves nothing behind if it fails."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from msamp.kernels import scalar_pool


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
