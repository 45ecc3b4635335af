"""CUDA graphs of a training step: forward and backward of a micro-batch, and the optimizer's step, each replayed as one launch.

What a step needs lives on the device: scales and amax histories, mu, FP16's loss scale, the gradients' buckets, learning rates, whether
the step is skipped. A replay runs no Python, so what Python did while the graph was captured is repeated around it: bytes sent are
counted again, and the averaged gradients, which stand at the same addresses in every replay, are handed to the optimizer again.
"""

import contextlib
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.lm.config import Config
from megatron.lm.peers import PeerRecipe
from megatron.lm.step import micro_batch_loss
from megatron.lm.training import Batches, Training

WARM_UP = 3  # eager steps as they will be captured: kernels are compiled, cuDNN and cuBLAS have chosen theirs, communicators exist
FIRST, MIDDLE, LAST, ONLY, UPDATE = "first", "middle", "last", "only", "update"  # micro-batches of a step by their place, and its end


def obstacle(config: Config) -> str | None:
    """Why the steps of this run cannot be captured; None where they can."""
    parallel, training, model = config.parallel, config.training, config.model
    found = {
        "there is no GPU": not torch.cuda.is_available(),
        "Transformer Engine's layers are not captured": isinstance(config.precision.named, PeerRecipe),
        "Triton is not installed": importlib.util.find_spec("triton") is None,
        "pipeline stages wait for each other's activations": parallel.pipeline_model_parallel_size > 1,
        # On two H200s: "operation would make the legacy stream depend on a capturing blocking stream", in backward.
        "without --sequence-parallel the sums of tensor-parallel layers are not captured": parallel.tensor_model_parallel_size > 1
        and not parallel.sequence_parallel,
        "dropout draws random numbers": model.hidden_dropout > 0 or model.attention_dropout > 0,
        "recomputation outside the fused FP8 layers saves random states": training.recompute_granularity == "full"
        or (training.recompute_granularity is not None and not config.fuses_layers),
        # Each sum of theirs is a new tensor, and fp8-sr draws random numbers.
        "--grad-accum-dtype fp8 and fp8-sr do not add up in place": config.precision.grad_accum in ("fp8", "fp8-sr"),
        "--grad-accum-on owner sends gradients in every micro-batch": config.precision.grad_accum == "owner",
        "gloo's collectives run on the host": torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo",
    }
    return next((reason for reason, holds in found.items() if holds), None)


def choose(config: Config) -> tuple[str, str]:
    """(mode, why it is that): what `--cuda-graph` asks for, or "step" where nothing stands in the way.

    Raises:
        ValueError: graphs are asked for where there can be none.
    """
    asked, reason = config.training.cuda_graph, obstacle(config)
    if asked == "none":
        return "none", "--cuda-graph none"
    if reason is None:
        return asked or "step", "forward and backward" if asked == "micro-batch" else "forward, backward and update"
    if asked is not None:
        raise ValueError(f"--cuda-graph {asked}: no graph can be captured, since {reason}; use --cuda-graph none, or drop the flag")
    return "none", reason


def build(training: Training) -> "StepGraphs | None":
    """The graphs of a training's steps, for `train_step`; None where they are eager (`choose`).

    Raises:
        ValueError: as `choose`.
    """
    mode, _ = choose(training.config)
    return None if mode == "none" else StepGraphs(training, mode)


class _Captured(NamedTuple):
    """A graph, and what Python did beside it: bytes sent by kind and collective, and, where Python looks at the averaged gradients (an
    eager update, the recorder), where they stand."""

    graph: torch.cuda.CUDAGraph
    sent: dict[tuple[str, str], int]
    averages: list[Any]


class StepGraphs:
    """The graphs of a training step, which share one memory pool.

    The first micro-batch of a step clears the gradients, the last sends them off, those between only add to them: up to three
    graphs, and one of the update, each captured when it is first needed. A step that counts its gradients (`Statistics.active`)
    has its own, and so has one that is recorded (`Statistics.recording`): its forward and backward hold what the watches do; with
    mode "step" the gradients of all but the recorded one stand in the same memory. Capture waits until delayed scaling has filled
    its window, since casts are just in time until then, and until every weight has been updated once; after the first capture no
    step is eager. Under ZeRO all weights are there before the next step begins: `--overlap-param-gather` overlaps in eager steps only.

    Args:
        training: what is trained, on one pipeline stage.
        mode: "micro-batch" or "step", which has the update too.

    Attributes:
        captured: graphs so far.
    """

    def __init__(self, training: Training, mode: str) -> None:
        self.training, self.mode = training, mode
        self._eager_steps = 0
        self._graphs: dict[tuple[str, bool, bool], _Captured] = {}
        self._batch: dict[str, Tensor] = {}
        self._sums = torch.zeros(2, device="cuda")  # of a micro-batch: loss, counted tokens
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def release(self) -> None:
        """Destroy the graphs: NCCL waits for those that hold its collectives before it lets a communicator go."""
        for done in self._graphs.values():
            done.graph.reset()
        self._graphs.clear()

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

    def forward_backward(self, batches: Batches) -> tuple[Tensor, Tensor]:
        """All micro-batches of a step, their gradients averaged: sums of loss and of counted tokens, on the device."""
        count = self.training.micro_batches
        places = [ONLY] if count == 1 else [FIRST, *([MIDDLE] * (count - 2)), LAST]
        self.training.optimizer.wait()  # under ZeRO for weights on their way: a graph cannot wait for what began outside it
        sums = []
        for place in places:
            self._fill(next(batches))
            self._replay(place)
            sums.append(self._sums.clone())
        loss_sums, tokens = zip(*(found.unbind() for found in sums), strict=True)
        return torch.stack(loss_sums).sum(), torch.stack(tokens).sum()

    def update(self) -> Tensor:
        """The optimizer's step, and the new scales. The gradient's norm, FP64 0-dim."""
        self.training.optimizer.refresh()
        self._replay(UPDATE)
        self.training.optimizer.replayed()
        self.training.scaling.count()
        return self.training.optimizer.grad_norm.clone()

    def _replay(self, place: str) -> None:
        sync = self.training.grad_sync
        key = (place, sync.statistics.active, sync.statistics.recording)
        known = key in self._graphs
        if not known:
            self._graphs[key] = self._capture(place)
        done = self._graphs[key]
        done.graph.replay()
        if known:
            for (kind, collective), size in done.sent.items():
                sync.sent.add(kind, collective, size)
            if place in (LAST, ONLY):
                sync.restore(done.averages)

    def _capture(self, place: str) -> _Captured:
        sync = self.training.grad_sync
        before = sync.sent.rows()
        graph = torch.cuda.CUDAGraph()
        if place in (FIRST, ONLY):  # now, so that their memory is free for the graph's pool, which takes none that is freed in a capture
            sync.clear()  # (7B at O0, 25 GiB of gradients: out of 139 GiB where 112 are at rest)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            if place == UPDATE:
                self._update()
            else:
                self._micro_batch(place)
        sent = {what: size - before.get(what, 0) for what, size in sync.sent.rows().items()}
        # The update's graph knows the addresses by itself, so that a second variant may have the first one's memory.
        handed_over = place in (LAST, ONLY) and (self.mode == "micro-batch" or sync.statistics.recording)
        return _Captured(graph, sent, sync.averages() if handed_over else [])

    def _micro_batch(self, place: str) -> None:
        sync = self.training.grad_sync
        if place in (FIRST, ONLY):
            sync.clear()
        with contextlib.nullcontext() if place in (LAST, ONLY) else sync.no_sync():
            mean, found = micro_batch_loss(self.training.model, self._batch)
            share, scaler = mean / self.training.micro_batches, self.training.loss_scaler
            (share if scaler is None else scaler.multiply(share)).backward()
            self._sums.copy_(torch.stack([found["loss_sum"], found["tokens"]]))
        if place in (LAST, ONLY):
            sync.finish()

    def _update(self) -> None:
        optimizer = self.training.optimizer
        optimizer.step()
        optimizer.wait()
        self.training.scaling.roll_on_device(self.training.grid.scales.group)

    def _fill(self, batch: dict[str, Tensor]) -> None:
        """Bring a micro-batch to where the graphs read it."""
        if not self._batch:
            self._batch = {name: torch.empty_like(x, memory_format=torch.contiguous_format) for name, x in batch.items()}
        for name, x in batch.items():
            self._batch[name].copy_(x, non_blocking=True)
