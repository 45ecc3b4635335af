"""What all CUDA graphs of a training step have in common: when they can begin, how one is captured, and what stands beside a replay.

What a step needs lives on the device: scales and amax histories, mu, FP16's loss scale, the gradients' buckets, learning rates, whether
the step is skipped. A replay runs no Python, so what Python did while the graph was captured is repeated around it: bytes sent are
counted again, and the averaged gradients, which stand at the same addresses in every replay, are handed to the optimizer again.

`megatron.lm.graphs.step_graph` has the graphs of a whole model: its micro-batches follow each other. `megatron.lm.graphs.stage_graph` has
those of a pipeline stage: there megatron-core's schedule has several micro-batches under way.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.lm.training.state import Training
from msamp.kernels import scalar_pool
from msamp.numerics.tensor import ScalingTensor

WARM_UP = 3  # eager steps as they will be captured: kernels are compiled, cuDNN and cuBLAS have chosen theirs, communicators exist
UPDATE = "update"


class Captured(NamedTuple):
    """A graph, and what Python did beside it: bytes sent by kind and collective; whether it left averaged gradients, and, where Python
    looks at them after every replay (an eager update, the recorder), where they stand; else `borrowed`, the same without owning the memory.
    """

    graph: torch.cuda.CUDAGraph
    sent: dict[tuple[str, str], int]
    finishes: bool
    averages: list[Any]
    borrowed: tuple[tuple[Any, str, Any], ...] = ()


class Replays:
    """Graphs by name, and the optimizer's among them.

    A step that counts its gradients (`Statistics.active`) has graphs of its own, and so has one that is recorded
    (`Statistics.recording`): its forward and backward hold what the watches do. With mode "step" the gradients of all but the recorded one
    stand in the same memory. Capture waits until delayed scaling has filled its window, since casts are just in time until then, and
    until every weight has been updated once; after the first capture no step is eager. Under ZeRO all weights are there before the next
    step begins: `--overlap-param-gather` overlaps in eager steps only.

    Args:
        training: what is trained.
        mode: "micro-batch" or "step", which has the update too.

    Attributes:
        captured: graphs so far.
    """

    def __init__(self, training: Training, mode: str) -> None:
        self.training, self.mode = training, mode
        self._eager_steps = 0
        self._graphs: dict[Hashable, Captured] = {}
        self._new: set[Hashable] = set()  # captured, and before their first replay
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def release(self) -> None:
        """Destroy the graphs, for good: NCCL waits for those that hold its collectives before it lets a communicator go."""
        for done in self._graphs.values():
            done.graph.reset()
        self._graphs.clear()
        self._new.clear()

    def ready(self) -> bool:
        """Whether the step that begins is to be replayed; counts the eager steps before the first one."""
        if self._graphs:
            return True
        if not all(layer.delayed for layer in self.training.scaling.layers.values()):
            return False
        optimizer = self.training.optimizer
        if self._eager_steps >= WARM_UP and all(optimizer.state.get(holding.weight) for holding in optimizer.holdings()):
            return True
        self._eager_steps += 1
        return False

    def update(self) -> Tensor:
        """The optimizer's step, and the new scales. The gradient's norm, FP64 0-dim."""
        self.training.optimizer.refresh()
        self._record(UPDATE, self._update)
        self._launch(UPDATE)
        self.training.optimizer.replayed()
        self.training.scaling.count()
        return self.training.optimizer.grad_norm.clone()

    @contextmanager
    def gradients_in_sight(self) -> Iterator[None]:
        """Between the forward and backward of a step and its update: in this block Python finds the averaged gradients of this step.

        With mode "step" it finds those of the graph that was captured last, and another graph may have been replayed. What it finds here
        does not own the memory, which graphs of other kinds of steps use too: it is right until the next graph runs.
        """
        current = [done for key, done in self._graphs.items() if done.finishes and key[1:] == self._key(None)[1:]]  # type: ignore[index]
        borrowed = [] if not self._known(UPDATE) else [average for done in current for average in done.borrowed]
        before = [(holder, name, getattr(holder, name)) for holder, name, _ in borrowed]
        for holder, name, average in borrowed:
            setattr(holder, name, average)
        try:
            yield
        finally:
            for holder, name, average in before:
                setattr(holder, name, average)

    def _update(self) -> None:
        optimizer = self.training.optimizer
        optimizer.step()
        optimizer.wait()
        self.training.scaling.roll_on_device(self.training.grid.scales.group, optimizer.usable)
        self.training.grad_sync.decided(optimizer.usable)

    def _key(self, name: Hashable) -> Hashable:
        statistics = self.training.grad_sync.statistics
        return (name, statistics.active, statistics.recording)

    def _known(self, name: Hashable) -> bool:
        """Whether a step like this one has captured what is called `name`."""
        return self._key(name) in self._graphs

    def _record(self, name: Hashable, run: Callable[[], None], pool: Any = None, *, finishes: bool = False) -> None:
        """Capture what `run` launches, unless a step like this one has. Nothing of it is computed until `_launch`.

        pool: of the memory; None: the one that all graphs share that are never under way together.
        finishes: whether it ends with the averaged gradients.
        """
        if not self._known(name):
            self._graphs[self._key(name)] = self._capture(run, self._pool if pool is None else pool, finishes)
            self._new.add(self._key(name))

    def _launch(self, name: Hashable) -> None:
        """Replay what was captured, and repeat what Python did then; the first time it has just done it."""
        sync, key = self.training.grad_sync, self._key(name)
        done = self._graphs[key]
        done.graph.replay()
        if key in self._new:
            self._new.remove(key)
            return
        for (kind, collective), size in done.sent.items():
            sync.sent.add(kind, collective, size)
        if done.finishes:
            sync.restore(done.averages)

    def _capture(self, run: Callable[[], None], pool: Any, finishes: bool) -> Captured:
        sync = self.training.grad_sync
        before = sync.sent.rows()
        graph = torch.cuda.CUDAGraph()
        with scalar_pool.captured(), self._capturing(graph, pool):
            run()
        sent = {what: size - before.get(what, 0) for what, size in sync.sent.rows().items()}
        # The update's graph knows the addresses by itself, so that a second variant may have the first one's memory.
        handed_over = finishes and (self.mode == "micro-batch" or sync.statistics.recording)
        lent = finishes and not handed_over
        borrowed = tuple((holder, name, alias(average)) for holder, name, average in sync.averages()) if lent else ()
        return Captured(graph, sent, finishes, sync.averages() if handed_over else [], borrowed)

    def _capturing(self, graph: torch.cuda.CUDAGraph, pool: Any) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")


def alias(x: Any) -> Any:
    """`x`, or of a tensor on a GPU another one in its memory that does not keep the memory from being reused; a ScalingTensor's payload and
    scale alike."""
    if isinstance(x, ScalingTensor):
        return ScalingTensor(alias(x.payload), alias(x.scale_inv), x.dtype)
    if x is None or not x.is_cuda or not x.numel():
        return x
    storage = x.untyped_storage()
    size = storage.nbytes() // x.element_size() * x.element_size()
    # As bytes: the interface of torch's tensors knows no FP8 and no BF16.
    owning = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, 0, (size,), (1,))
    memory = torch.as_tensor(_Address(owning.__cuda_array_interface__), device=x.device)
    return memory.view(x.dtype).as_strided(x.size(), x.stride(), x.storage_offset())


class _Address:
    """Memory by its address, as torch takes it from other libraries."""

    def __init__(self, interface: Any) -> None:
        self.__cuda_array_interface__ = interface


class Inputs:
    """Where a graph reads its micro-batch: tensors that stay where they are."""

    def __init__(self) -> None:
        self.batch: dict[str, Tensor] = {}

    def fill(self, batch: dict[str, Tensor]) -> None:
        """Bring a micro-batch there."""
        if not self.batch:
            self.batch = {name: torch.empty_like(x, memory_format=torch.contiguous_format) for name, x in batch.items()}
        for name, x in batch.items():
            self.batch[name].copy_(x, non_blocking=True)
