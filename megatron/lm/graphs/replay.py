"""Common code of the CUDA graphs of a training step: when capture starts, how a graph is captured, and what Python repeats per replay.

The state of a step is on the device: scales and amax histories, mu, FP16's loss scale, gradient buckets, learning rates, the skip flag.
A replay runs no Python, so the side effects of Python during capture are repeated at each replay: bytes sent are counted again, and the
optimizer gets the averaged gradients again, which have the same addresses in every replay.

`megatron.lm.graphs.step_graph` contains the graphs of a whole model, where micro-batches run one after another.
`megatron.lm.graphs.stage_graph` contains the graphs of a pipeline stage, where several micro-batches are in flight.
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.lm.training.state import Training
from msamp.kernels.cuda_graph import capturing
from msamp.nn.expert_matrices import ExpertMatrices
from msamp.numerics.tensor import ScalingTensor
from msamp.parallel.greedy_zero import ZeRO

WARM_UP = 3  # eager steps before capture, to compile kernels, let cuDNN and cuBLAS choose theirs, and create communicators
UPDATE = "update"


class Captured(NamedTuple):
    """A graph and Python's side effects during its capture: bytes sent by kind and collective; whether the graph ends with averaged
    gradients; `averages`, their location if Python reads them after every replay (an eager update, the recorder); else `borrowed`, the same
    without owning the memory."""

    graph: torch.cuda.CUDAGraph
    sent: dict[tuple[str, str], int]
    finishes: bool
    averages: list[Any]
    borrowed: tuple[tuple[Any, str, Any], ...] = ()


class Replays:
    """The graphs of a training step by name, including the optimizer's.

    Steps that count gradient statistics (`Statistics.active`), recorded steps (`Statistics.recording`) and steps that `--fp8-guard`
    measures have their own graphs, which contain the measuring kernels. In mode "step" all graphs but the recorded one share the memory of
    the gradients. The first micro-batch casts the weights of experts for all. Capture waits until delayed scaling has filled its window,
    since casts use just-in-time scales until then, and until every weight was updated once. No step is eager after the first capture;
    where the guard raises or returns a layer, the trainer replaces this object.

    Under ZeRO the update's graph ends with the all-gather of the new weights, unless `zero` is set: then the first graph of the next step
    starts it (`ZeRO.deferring`), and anything that reads weights between two steps calls `optimizer.wait` first.

    Args:
        training: the training state.
        mode: "micro-batch", or "step", which includes the update.

    Attributes:
        captured: number of graphs so far.
        zero: the optimizer's ZeRO if the step's first graph gathers the weights; else None.
    """

    zero: ZeRO | None = None

    def __init__(self, training: Training, mode: str) -> None:
        self.training, self.mode = training, mode
        self._eager_steps = 0
        self._graphs: dict[Hashable, Captured] = {}
        self._new: set[Hashable] = set()  # captured but not replayed yet
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._experts = [module for module in training.model.modules() if isinstance(module, ExpertMatrices)]

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def release(self) -> None:
        """Destroy the graphs. NCCL cannot destroy a communicator while a graph contains its collectives."""
        for done in self._graphs.values():
            done.graph.reset()
        self._graphs.clear()
        self._new.clear()

    def ready(self) -> bool:
        """Return whether graphs run the next step; counts the eager steps before the first capture."""
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
        """Run the optimizer's step and set the new scales; return the gradient norm, FP64 0-dim."""
        self.training.optimizer.refresh()
        self._record(UPDATE, self._update)
        self._launch(UPDATE)
        if self.zero is not None:
            self.zero.deferred = True
        self.training.optimizer.replayed()
        self.training.scaling.count()
        return self.training.optimizer.grad_norm.clone()

    @contextmanager
    def gradients_in_sight(self) -> Iterator[None]:
        """Make this step's averaged gradients visible to Python inside the block, between backward and the update.

        Otherwise, in mode "step", Python sees the gradients of the graph that was captured last, which may not be the one that was
        replayed. The tensors do not own their memory, which other graphs share: they are valid until the next graph runs.
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
        if self.zero is None:
            optimizer.step()
            optimizer.wait()
        else:
            with self.zero.deferring():
                optimizer.step()
        grid = self.training.grid
        self.training.scaling.roll_on_device(grid.scales.group, optimizer.usable, copies=grid.copies.group)
        self.training.grad_sync.decided(optimizer.usable)
        self.training.experts.end_step(optimizer.usable)

    def _key(self, name: Hashable) -> Hashable:
        statistics, guard = self.training.grad_sync.statistics, self.training.guard
        return (name, statistics.active, statistics.recording, guard is not None and guard.armed)

    def _begin(self, first: Hashable) -> None:
        """Begin a step whose first graph is `first`: free what eager code left behind that no graph reads.

        In every step that is the cast of the experts' weights of an eager forward: of the last eager step, or of an evaluation, which would
        keep it in addition to the graphs' own (3 GiB of 8 layers of OLMoE at O3). Before the first capture it is also the gradients and
        the allocator's cache: a graph's pool cannot use memory that is freed during the capture or cached. And an eager step's autograd
        graph that only waits for the garbage collector keeps its AccumulateGrad nodes, which would run on the default stream and
        invalidate the capture.
        """
        for weight in self._experts:
            weight.drop_cast()
        if not self._known(first):
            self.training.grad_sync.clear()
            gc.collect()
            torch.cuda.empty_cache()

    def _known(self, name: Hashable) -> bool:
        """Return whether `name` is captured for this kind of step."""
        return self._key(name) in self._graphs

    def _record(self, name: Hashable, run: Callable[[], None], pool: Any = None, *, finishes: bool = False) -> None:
        """Capture the kernels of `run`, unless they are captured for this kind of step. They only run in `_launch`.

        pool: memory pool; None is the pool of all graphs that never run concurrently.
        finishes: whether the graph ends with averaged gradients.
        """
        if not self._known(name):
            self._graphs[self._key(name)] = self._capture(run, self._pool if pool is None else pool, finishes)
            self._new.add(self._key(name))

    def _launch(self, name: Hashable) -> None:
        """Replay a graph and repeat Python's side effects, except right after capture, which has just had them."""
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
        with capturing(graph, pool=pool, stream=self._stream):
            run()
        sent = {what: size - before.get(what, 0) for what, size in sync.sent.rows().items()}
        # The update's graph contains the addresses of the gradients, so a second variant may reuse the first one's memory.
        handed_over = finishes and (self.mode == "micro-batch" or sync.statistics.recording)
        lent = finishes and not handed_over
        borrowed = tuple((holder, name, alias(average)) for holder, name, average in sync.averages()) if lent else ()
        return Captured(graph, sent, finishes, sync.averages() if handed_over else [], borrowed)


def alias(x: Any) -> Any:
    """Return a tensor with the memory of `x` that does not own it, for GPU tensors and ScalingTensors; else `x`."""
    if isinstance(x, ScalingTensor):
        return ScalingTensor(alias(x.payload), alias(x.scale_inv), x.dtype)
    if x is None or not x.is_cuda or not x.numel():
        return x
    storage = x.untyped_storage()
    size = storage.nbytes() // x.element_size() * x.element_size()
    # As bytes, because __cuda_array_interface__ does not support FP8 and BF16.
    owning = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, 0, (size,), (1,))
    memory = torch.as_tensor(_Address(owning.__cuda_array_interface__), device=x.device)
    return memory.view(x.dtype).as_strided(x.size(), x.stride(), x.storage_offset())


class _Address:
    """A memory address in the form that `torch.as_tensor` accepts from other libraries."""

    def __init__(self, interface: Any) -> None:
        self.__cuda_array_interface__ = interface


class Inputs:
    """Static tensors from which a graph reads its micro-batch."""

    def __init__(self) -> None:
        self.batch: dict[str, Tensor] = {}

    def fill(self, batch: dict[str, Tensor]) -> None:
        """Copy a micro-batch into them."""
        if not self.batch:
            self.batch = {name: torch.empty_like(x, memory_format=torch.contiguous_format) for name, x in batch.items()}
        for name, x in batch.items():
            self.batch[name].copy_(x, non_blocking=True)
