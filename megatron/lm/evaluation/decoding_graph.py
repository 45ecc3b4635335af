"""CUDA graphs of a step of generation: one for each span of the cache that a step attends over, replayed as one launch.

A replay reads and writes the memory that the captured step did. So a step reads its tokens and their places from buffers that stay where
they are, and the graphs remember every tensor that a step reads: where one of them stands elsewhere when a batch begins, the graphs are
dropped and captured again. Weights that an optimizer changes in place are read as they are.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from msamp.kernels import scalar_pool

WARM_UP = 2  # eager steps of a span before it is captured: kernels are compiled, cuDNN and cuBLAS have chosen theirs

Run = Callable[[], Tensor]
_Form = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


class Captured(NamedTuple):
    """A captured step.

    Attributes:
        replay: repeats its work.
        out: where its result stands after a replay, until the next one.
    """

    replay: Callable[[], None]
    out: Tensor


class Device(Protocol):
    """What captures."""

    def warm_up(self, run: Run) -> Tensor:
        """The result of an eager run, on the stream that captures."""

    def capture(self, run: Run) -> Captured:
        """RuntimeError where it cannot be captured."""


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # One for all decoders: cuBLAS keeps a workspace for every stream for good.
    return torch.cuda.Stream(device)


class CudaDevice:
    """Graphs of one GPU, which share one memory pool; it is freed with the last of them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Run) -> Tensor:
        """As `Device`."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            out = run()
        here.wait_stream(self._stream)
        out.record_stream(here)
        return out

    def capture(self, run: Run) -> Captured:
        """As `Device`."""
        graph = torch.cuda.CUDAGraph()
        with scalar_pool.captured(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = run()
        return Captured(graph.replay, out)


def obstacle() -> str | None:
    """Why no step can be captured on a GPU; None where it can."""
    return "Triton is not installed" if importlib.util.find_spec("triton") is None else None


def tell(reason: str) -> None:
    """Say that generation is eager."""
    warnings.warn(
        f"steps of generation are launched kernel by kernel, slower, since {reason}; Decoder(..., graph=False) wants it so", stacklevel=3
    )


class DecodingGraphs:
    """The graphs of a decoder's steps.

    Args:
        device: what captures.

    Attributes:
        captures: steps that were captured so far.
    """

    def __init__(self, device: Device) -> None:
        self.captures = 0
        self._device = device
        self._refused = False
        self._eager: dict[int, int] = {}
        self._graphs: dict[int, Captured] = {}
        self._forms: list[_Form] = []
        self._held: list[Tensor] = []

    def __len__(self) -> int:
        """Graphs that are held."""
        return len(self._graphs)

    def __deepcopy__(self, memo: object) -> "DecodingGraphs":
        """None captured yet: a graph reads and writes the memory of the decoder that it was captured for."""
        return DecodingGraphs(self._device)

    def release(self) -> None:
        """Drop all graphs, and what they hold of memory."""
        self._graphs.clear()
        self._eager.clear()
        self._forms, self._held = [], []

    def begin(self, read: Sequence[Tensor]) -> None:
        """Before the steps of a batch: graphs are dropped where they read other memory.

        Args:
            read: all tensors that a step reads or writes beside what it makes itself. They are held until other ones come, so that no
                other tensor gets their addresses.
        """
        forms = [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in read]
        if forms != self._forms:
            self.release()
            self._forms, self._held = forms, list(read)

    def step(self, span: int, run: Run) -> Tensor:
        """The result of `run`, by a replay where one is there.

        Args:
            span: what tells graphs apart.
            run: reads and writes at fixed addresses; a second run changes nothing.
        """
        if self._refused:
            return run()
        if span not in self._graphs:
            self._eager[span] = self._eager.get(span, 0) + 1
            if self._eager[span] <= WARM_UP:
                return self._device.warm_up(run)
            try:
                self._graphs[span] = self._device.capture(run)
            except RuntimeError as error:
                self.release()
                self._refused = True
                tell(f"a step cannot be captured: {str(error).strip().partition(chr(10))[0]}")
                return run()
            self.captures += 1
        captured = self._graphs[span]
        captured.replay()
        return captured.out.clone()
