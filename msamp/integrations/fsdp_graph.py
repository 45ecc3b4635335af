"""A training step under FSDP2 as one CUDA graph:

    from msamp.integrations.fsdp_graph import GraphedStep

    def forward_backward(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    step = GraphedStep(model, optimizer, forward_backward)      # after fully_shard; the optimizer of fsdp.optimizer
    for x, y in batches:
        loss = step(x, y)                                       # forward, backward, optimizer.step() and zero_grad()

Why: FSDP2 runs Python before and after every block in forward and backward. It allocates, gathers and frees each weight, for BF16 as for
FP8. The host issues a step of a 1.3B model more slowly than the GPU computes it, even in BF16 (`tools/bench/LOG.md`), so faster GEMMs alone
gain nothing. A graph contains the kernels, the collectives of NCCL, and the dependencies between FSDP2's streams, and is launched at once.

The first steps are eager: until every delayed scale has a full history, every weight has optimizer states, and kernels and communicators
exist. Then a step is captured, and later ones are replayed. All ranks must call it together. A replay runs none of the loop's Python, so
whatever `forward_backward` decides on the host is decided once: capture again with `release()` after the model is changed, frozen or
switched between training and evaluation. New learning rates of the optimizer reach the graph. If weights were written by something else, or
weights, buffers or states have moved, as after loading, some steps are eager and one is captured again.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from msamp.integrations.fsdp import ShardedOptimizer
from msamp.kernels.cuda_graph import capturing, unregistrable
from msamp.nn.scaling_state import TensorScales
from msamp.optim.states import is_scaled, payload, scale_inv

WARM_UP = 3  # eager steps with full histories before capture: kernels are compiled and chosen, tables and communicators exist
_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream")


class GraphedStep:
    """A training step that is captured once and replayed; see the module's description.

    Args:
        model: after `fully_shard`.
        optimizer: of `fsdp.optimizer`, or one of torch with `capturable=True` and learning rates in tensors, as a baseline.
        forward_backward: called with a step's inputs; runs forward and backward of all micro-batches and returns the loss, 0-dim. It must
            not read values from the GPU.
        update: runs instead of `optimizer.step` between the backward and `zero_grad`.

    Attributes:
        captured: how often a step was captured.

    Raises:
        ValueError: if the model is not sharded, the optimizer has other parameters or cannot be captured, or this torch's FSDP2 has other
            streams.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        forward_backward: Callable[..., torch.Tensor],
        update: Callable[[], Any] | None = None,
    ) -> None:
        if not isinstance(model, FSDPModule):
            raise ValueError(f"the model is a {type(model).__name__} that is not sharded; call fully_shard(model) before GraphedStep")
        if (reason := unregistrable()) is not None:
            raise ValueError(f"a step cannot be captured in a CUDA graph: {reason}")
        known = {id(p) for p in model.parameters()}
        if not all(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            raise ValueError("the optimizer has parameters that are not in this model; build it from model.parameters() after fully_shard")
        self._own = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        if self._own is None:
            for group in optimizer.param_groups:
                if not (group.get("capturable") and isinstance(group["lr"], torch.Tensor)):
                    raise ValueError(
                        f"{type(optimizer).__name__} reads its learning rate {group['lr']} on the host; pass lr=torch.tensor(...) and "
                        "capturable=True, or the optimizer of msamp.integrations.fsdp.optimizer"
                    )
        self.model, self.optimizer, self.forward_backward = model, optimizer, forward_backward
        self.update = optimizer.step if update is None else update
        self._scales = [layer for layer in model.modules() if isinstance(layer, TensorScales) and layer.window]
        self._eager_steps = self.captured = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[torch.Tensor] = []
        self._loss = torch.zeros((), device="cpu")
        self._memory: tuple[int, ...] = ()

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run one step and return its loss, detached. Collective.

        Raises:
            ValueError: for inputs that are not tensors, or, in a replayed step, that have other shapes or dtypes than the captured ones.
        """
        if not all(isinstance(x, torch.Tensor) for x in inputs):
            raise ValueError(
                f"inputs are {', '.join(type(x).__name__ for x in inputs)}; pass tensors, which are copied to where the graph reads"
            )
        # Both conditions hold on all ranks or on none after loading. A replay on some and an eager step on others would not end.
        written = self._own is not None and self._own.shard.stale  # by something other than a step
        if self._graph is not None and (written or self._memory != self._addresses()):
            self.release()
        if self._graph is None and not self._ready(inputs):
            return self._eager(*inputs)
        if self._own is not None:
            self._own.refresh()  # before a capture too: a learning rate sent inside it would be used in every replay
        if self._graph is None:
            self._capture(inputs)
        if [(x.shape, x.dtype) for x in inputs] != [(x.shape, x.dtype) for x in self._inputs]:
            raise ValueError(
                f"inputs are {[(tuple(x.shape), x.dtype) for x in inputs]}, but the graph was captured with "
                f"{[(tuple(x.shape), x.dtype) for x in self._inputs]}; pad the batch, or call release() before a step of another shape"
            )
        for place, x in zip(self._inputs, inputs, strict=True):
            place.copy_(x, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        if self._own is not None:
            self._own.replayed()
        return self._loss.clone()

    def release(self) -> None:
        """Destroy the graph and free its memory; after `WARM_UP` eager steps, one is captured again.

        Call it before `destroy_process_group`: NCCL cannot destroy a communicator while a graph contains its collectives.
        """
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
        self._graph, self._inputs, self._eager_steps = None, [], 0

    def _ready(self, inputs: tuple[torch.Tensor, ...]) -> bool:
        """Whether this step can be captured."""
        on_gpu = all(x.is_cuda for x in (next(self.model.parameters()), *inputs))
        return on_gpu and all(layer.delayed for layer in self._scales) and self._eager_steps >= WARM_UP

    def _eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        self._eager_steps += all(layer.delayed for layer in self._scales)
        return self._step(*inputs)

    def _step(self, *inputs: torch.Tensor) -> torch.Tensor:
        loss = self.forward_backward(*inputs).detach()
        self.update()
        self.optimizer.zero_grad()
        return loss

    def _capture(self, inputs: tuple[torch.Tensor, ...]) -> None:
        self._inputs = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
        self.optimizer.zero_grad()
        gc.collect()  # an eager step's autograd graph that waits for it would bring the default stream into the capture
        graph = torch.cuda.CUDAGraph()
        dist.barrier()  # no rank may still be running an eager collective
        torch.cuda.synchronize()
        with capturing(graph):
            self._loss = self._step(*self._inputs)
            for stream in _streams(self.model):
                torch.cuda.current_stream().wait_stream(stream)  # FSDP2's streams end with a wait, which a capture must join
        self._graph, self._memory = graph, self._addresses()
        self.captured += 1

    def _addresses(self) -> tuple[int, ...]:
        """Return where the graph finds weights, buffers and optimizer states."""
        held: list[torch.Tensor] = [*self.model.parameters(), *self.model.buffers()]
        held += [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        scales = [scale_inv(x) for x in held if is_scaled(x)]
        return tuple(x.data_ptr() for x in [*map(payload, held), *scales] if x is not None)


def _streams(model: FSDPModule) -> list[torch.cuda.Stream]:
    """Return the streams of FSDP2's collectives, which it has no public name for."""
    context = getattr(model._get_fsdp_state(), "_comm_ctx", None)  # type: ignore[attr-defined]
    streams = [getattr(context, name, None) for name in _STREAMS]
    if None in streams:
        raise ValueError(f"FSDP2 of torch {torch.__version__} has no streams {', '.join(_STREAMS)}; use eager steps with this version")
    return streams  # type: ignore[return-value]
