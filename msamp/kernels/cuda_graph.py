"""Capture of a CUDA graph, which leaves nothing behind if it fails, and a watch for code that cannot be captured."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from msamp.kernels import scalar_pool

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_TORCH, _OWN = (os.path.join(os.path.dirname(os.path.abspath(path)), "") for path in (torch.__file__, os.path.dirname(__file__)))
_ASKING = ("masking_utils.py",)


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
def capturing(
    graph: torch.cuda.CUDAGraph, *, pool: Any = None, stream: torch.cuda.Stream | None = None, watch: "HostReads | None" = None
) -> Iterator[None]:
    """Context in which kernels are captured into `graph`, with scalars that it zeroes itself (`scalar_pool.captured`).

    The capture may fail, for example for lack of memory. The error's traceback then keeps `graph`, and NCCL waits at its end for graphs
    with its collectives: the process would not end, and its message would not be seen. So `graph` is reset before the error leaves. If a
    collective is under way then, CUDA refuses to end the capture ("unjoined work"), and torch leaves its stream current: that error is not
    the cause, and the stream is the caller's again.

    Args:
        graph: a new graph.
        pool: memory pool of `torch.cuda.graph_pool_handle`; None is a new one.
        stream: to capture on; None is one that `torch.cuda.graph` keeps for captures.
        watch: raises for what cannot be captured, before CUDA does.
    """
    current = torch.cuda.current_stream()
    failed: BaseException | None = None
    try:
        # Other threads may use CUDA meanwhile: data loading, writing of checkpoints, NCCL's watchdog.
        with (
            scalar_pool.captured(modes=0 if watch is None else 1),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            contextlib.nullcontext() if watch is None else watch,
        ):
            try:
                yield
            except BaseException as error:
                failed = error
                raise
    except BaseException as error:
        torch.cuda.set_stream(current)
        graph.reset()
        if failed is None or failed is error:
            raise
        raise failed from failed.__cause__


class HostReads(TorchDispatchMode):
    """Finds operations after which the host knows values of a tensor: `item`, `if tensor`, `nonzero`, masks as indices, copies to and from
    the CPU. A CUDA graph cannot contain them, and Python that follows such a value would be decided once, at capture.

    While CUDA captures, the first one raises, before CUDA would invalidate the capture, which can leave torch's random generators unusable.
    On a CPU it is only recorded, unless it is in this library, whose CPU kernels read values that its GPU kernels do not, or in a file
    of transformers that reads none while CUDA captures.

    Attributes:
        found: the operation and the line that called it; None if there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile run compiled code under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = self.found is None and _reads(func, args, kwargs or {})
        if read:
            line, own = _caller()
            on_gpu = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if on_gpu or not own:
                self.found = f"{line} {read}"
            if on_gpu:
                raise RuntimeError(self.found)
        return func(*args, **(kwargs or {}))


def _reads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what makes the host wait for an operation's values, "" if nothing does."""
    name = str(func).removesuffix(".default")
    if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
        source, target = (args[0], kwargs.get("device")) if len(args) == 1 else (args[1], args[0].device)
        kinds = {source.device.type, torch.device(target).type if target is not None else source.device.type}
        # This library copies tables from pinned memory that it keeps, which a graph may read again.
        copied = kinds == {"cpu", "cuda"} and not _caller()[1]
        return f"copies a tensor between {source.device} and {target} ({name})" if copied else ""
    masks = [x for x in tree_leaves(args[1:2]) if isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8)]
    if func == torch.ops.aten.index.Tensor or func in (torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default):
        filled = func != torch.ops.aten.index.Tensor and args[2].numel() == 1
        return f"indexes by a mask ({name})" if masks and not filled else ""
    if torch.Tag.data_dependent_output in func.tags or func == torch.ops.aten.equal.default:
        return f"reads a value of a tensor on the host ({name})"
    if torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
        return f"creates a tensor whose shape depends on values ({name})"
    return ""


def _caller() -> tuple[str, bool]:
    """Return the innermost line of Python outside torch, as "file:line", and whether it is in this library."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, "<")) and file != __file__:
            return f"{os.path.basename(file)}:{frame.f_lineno}", file.startswith(_OWN) or os.path.basename(file) in _ASKING
        frame = frame.f_back  # type: ignore[assignment]
    return "backward", False
