"""CUDA graphs of a decoding step: one for each span of the cache that a step attends over, replayed as one launch.

A replay reads and writes the memory of the captured step. So a step reads its tokens and positions from static buffers, and the graphs
record every tensor that a step reads: if one of them has moved when a batch starts, the graphs are dropped and captured again. Weights that
an optimizer updates in place are read with their current values.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from msamp.kernels.cuda_graph import capturing

WARM_UP = 2  # eager steps of a span before capture, to compile kernels and let cuDNN and cuBLAS choose theirs

Run = Callable[[], Tensor]
_Form = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


class Captured(NamedTuple):
    """A captured step.

    Attributes:
        replay: runs the graph.
        out: contains the result after a replay, until the next one.
    """

    replay: Callable[[], None]
    out: Tensor


class Device(Protocol):
    """A device that captures steps."""

    def warm_up(self, run: Run) -> Tensor:
        """Return the result of an eager run on the capturing stream."""

    def capture(self, run: Run) -> Captured:
        """Capture a run; raise a RuntimeError if that is impossible."""


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # One for all decoders, since cuBLAS never frees the workspace of a stream.
    return torch.cuda.Stream(device)


class CudaDevice:
    """Capture on a GPU, with one memory pool for all graphs, which is freed with the last of them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Run) -> Tensor:
        """See `Device`."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            out = run()
        here.wait_stream(self._stream)
        out.record_stream(here)
        return out

    def capture(self, run: Run) -> Captured:
        """See `Device`."""
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool=self._pool, stream=self._stream):
            out = run()
        return Captured(graph.replay, out)


def obstacle() -> str | None:
    """Return why no step can be captured on a GPU, or None if it can."""
    return "Triton is not installed" if importlib.util.find_spec("triton") is None else None


def warn_eager(reason: str) -> None:
    """Warn that generation is eager."""
    warnings.warn(
        f"generation runs without CUDA graphs, slower, because {reason}; Decoder(..., graph=False) hides this warning", stacklevel=3
    )


class DecodingGraphs:
    """The graphs of a decoder's steps.

    Args:
        device: captures the steps.

    Attributes:
        captures: number of steps captured so far.
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
        """Return the number of graphs in memory."""
        return len(self._graphs)

    def __deepcopy__(self, memo: object) -> "DecodingGraphs":
        """Return an object without graphs: a graph uses the memory of the decoder for which it was captured."""
        return DecodingGraphs(self._device)

    def release(self) -> None:
        """Drop all graphs and free their memory."""
        self._graphs.clear()
        self._eager.clear()
        self._forms, self._held = [], []

    def begin(self, read: Sequence[Tensor]) -> None:
        """Start a batch: drop the graphs if they read other memory.

        Args:
            read: all tensors that exist before a step and that it reads or writes. They are kept until the next `begin`, so that no other
                tensor gets their addresses.
        """
        forms = [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in read]
        if forms != self._forms:
            self.release()
            self._forms, self._held = forms, list(read)

    def step(self, span: int, run: Run) -> Tensor:
        """Return the result of `run`, by a replay if there is a graph.

        Args:
            span: key of the graph.
            run: reads and writes fixed addresses; running it twice must change nothing.
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
                warn_eager(f"a step cannot be captured: {str(error).strip().partition(chr(10))[0]}")
                return run()
            self.captures += 1
        captured = self._graphs[span]
        captured.replay()
        return captured.out.clone()
