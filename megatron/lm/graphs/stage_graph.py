"""CUDA graphs of a pipeline stage: forward and backward of each micro-batch, between what the stages send each other.

What: megatron-core's schedule decides when a stage runs which forward and which backward, and sends and receives between them. It asks
for a chunk's output and later for its gradient. Here both are one launch: a graph of the forward, and a graph of the backward that belongs
to it.

    received ->  input  --[ forward ]-->  output  -> sent on
    batch    ->  batch        |
                              | what backward needs stays in the slot's pool
                              v
    sent back <- grad_input <--[ backward ]--  grad_output <- received

Why slots: several micro-batches are under way at once, and each has its own input, batch and memory. A micro-batch takes the first slot
that is free and gives it back after its backward, so that a chunk has as many as it ever has under way: on stage p of P, P - p without
interleaving. A slot's graphs share a memory pool of its own, since they never overlap each other. So the number of graphs does not grow
with the micro-batches of a step: for each slot a pair that adds to the gradients, and one pair more, of a chunk's first micro-batch, which
begins their sums.

Why both are captured when the forward is first asked for: nothing is computed in a capture, and backward directly after forward finds the
memory of the slot's pool as every replay will. Its hooks see the micro-batches in the order of their forwards, which per chunk is that of
their backwards.

Why gradients leave behind the pipeline, in a graph of their own (`FINISH`), and not during the last backward as in eager steps: a graph
ends when all of it has ended, so that an exchange inside the last backward would hold up the gradient that the stage before waits for, and
one with other stages would never end. Stages that are done early exchange while others still compute.

Why capture does not wait for the device, as `torch.cuda.graph` does: with interleaved stages a receive may be under way, and its sender
may wait for this rank.

Same bits as eager steps: the work is the same, in the same order.
"""

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.lm.config import Config
from megatron.lm.graphs.replay import Inputs, Replays
from megatron.lm.model.gpt import GPT
from megatron.lm.step import forward_backward, model_output
from megatron.lm.training.gradients import chunks
from megatron.lm.training.state import Batches, Training

FORWARD, BACKWARD, FINISH = "forward", "backward", "finish"


class MicroBatchBuffers(Inputs):
    """Where the graphs of one micro-batch under way read and write.

    Attributes:
        input: hidden states of the stage before, [s, b, h] with sequence parallelism a share of s; None on the first chunk of all.
        output: hidden states for the next stage, or the sum of losses, FP32 0-dim.
        made: what the forward returned, until its backward has been captured.
        pool: memory of the slot's graphs.
    """

    def __init__(self, number: int, input_like: Tensor | None, output_like: Tensor) -> None:
        super().__init__()
        self.number = number
        self.input = None if input_like is None else torch.empty_like(input_like).requires_grad_()
        self.output = torch.empty_like(output_like)
        self.made: Tensor | None = None
        self.pool = torch.cuda.graph_pool_handle()


class Chunk:
    """A part of the model on this stage, and the slots of its micro-batches.

    Attributes:
        begun: forwards of this step.
        grad_output: gradient of the output, which a backward reads.
        grad_input: gradient of the input, which it leaves; None on the first chunk of all.
        source: stands for the input of the first chunk, so that autograd comes back.
    """

    def __init__(self, number: int, model: GPT, config: Config) -> None:
        self.number, self.model = number, model
        parallel, device = config.parallel, next(model.parameters()).device
        rows = config.model.seq_length // (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)
        shape = (rows, config.training.micro_batch_size, config.model.hidden_size)
        hidden = torch.empty(shape, dtype=model.config.pipeline_dtype, device=device)
        self._output_like = torch.empty((), device=device) if model.post_process else hidden
        self.grad_output = torch.empty_like(self._output_like)
        self.grad_input = None if model.pre_process else hidden
        self.source = torch.zeros((), device=device, requires_grad=True)
        self.slots: list[MicroBatchBuffers] = []
        self.begin()

    def begin(self) -> None:
        """A step begins: no micro-batch is under way."""
        self.begun, self._free = 0, list(self.slots)
        self._under_way: list[MicroBatchBuffers] = []

    def take(self) -> MicroBatchBuffers:
        """The first free slot, for the next forward."""
        self.begun += 1
        if not self._free:
            self._free = [MicroBatchBuffers(len(self.slots), self.grad_input, self._output_like)]
            self.slots += self._free
        self._under_way.append(self._free.pop(0))
        return self._under_way[-1]

    def give_back(self, slot: MicroBatchBuffers) -> None:
        """After its backward.

        Raises:
            RuntimeError: an earlier micro-batch's is still to come. The graph of the first one begins the sums that others add to.
        """
        if self._under_way.pop(0) is not slot:
            raise RuntimeError("a pipeline schedule that runs backwards in another order than forwards does not go with --cuda-graph")
        self._free = sorted([*self._free, slot], key=lambda each: each.number)


class StageGraphs(Replays):
    """The graphs of a training step on a stage of a pipeline, interleaved or not.

    Args:
        training: what is trained, with several pipeline stages.
        mode: as `Replays`.

    Attributes:
        chunks: this rank's parts of the model, in order.
    """

    def __init__(self, training: Training, mode: str) -> None:
        super().__init__(training, mode)
        self.chunks = [Chunk(number, model, training.config) for number, model in enumerate(chunks(training.model))]

    def forward_backward(self, batches: Batches) -> tuple[Tensor, Tensor]:
        """All micro-batches of a step, their gradients averaged: sums of loss and of counted tokens, on the device."""
        training = self.training
        training.optimizer.wait()  # under ZeRO for weights on their way: a graph cannot wait for what began outside it
        if not self._known(FINISH):  # make room: pools take nothing that is freed in a capture, and nothing that the allocator keeps
            training.grad_sync.clear()
            gc.collect()
            torch.cuda.empty_cache()
        for chunk in self.chunks:
            chunk.begin()
        found = forward_backward(training, batches, forward=self._output)
        # In the memory of the first slot: its activations are gone by now, and the averages before its next forward.
        self._record(FINISH, training.grad_sync.finish, self.chunks[0].slots[0].pool, finishes=True)
        self._launch(FINISH)
        return found

    def _output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """What a chunk makes of a micro-batch, with a gradient, as megatron-core's schedule asks for it."""
        chunk = next(each for each in self.chunks if each.model is model)
        first, slot, received = chunk.begun == 0, chunk.take(), chunk.model.decoder.input_tensor
        slot.fill(batch)
        self._record((FORWARD, chunk.number, slot.number, first), functools.partial(self._forward, chunk, slot, first), slot.pool)
        self._record((BACKWARD, chunk.number, slot.number, first), functools.partial(self._backward, chunk, slot), slot.pool)
        return _Replayed.apply(chunk.source if received is None else received, self, chunk, slot, first)

    def _forward(self, chunk: Chunk, slot: MicroBatchBuffers, first: bool) -> None:
        if first and chunk.number == 0:
            self.training.grad_sync.clear()
        chunk.model.set_input_tensor([slot.input])
        with torch.enable_grad():
            slot.made = model_output(chunk.model, slot.batch)
        slot.output.copy_(slot.made.detach())

    def _backward(self, chunk: Chunk, slot: MicroBatchBuffers) -> None:
        assert slot.made is not None
        with self.training.grad_sync.no_sync():  # `finish` takes the sums
            slot.made.backward(chunk.grad_output)
        slot.made = None
        if slot.input is not None and slot.input.grad is not None and chunk.grad_input is not None:
            chunk.grad_input.copy_(slot.input.grad)
            slot.input.grad = None

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()


class _Replayed(torch.autograd.Function):
    """A micro-batch through a chunk, forward and backward by graphs."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, graphs: StageGraphs, chunk: Chunk, slot: MicroBatchBuffers, first: bool) -> Tensor:
        ctx.of = (graphs, chunk, slot, first)
        if slot.input is not None:
            slot.input.copy_(received)
        graphs._launch((FORWARD, chunk.number, slot.number, first))
        # Hidden states have been sent when the slot's next forward writes over them; the log keeps a loss for longer.
        return slot.output.clone() if chunk.model.post_process else slot.output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        graphs, chunk, slot, first = ctx.of
        chunk.grad_output.copy_(grad_output)
        graphs._launch((BACKWARD, chunk.number, slot.number, first))
        chunk.give_back(slot)
        # A copy, since it is on its way to the stage before when the next backward writes there.
        return None if chunk.grad_input is None else chunk.grad_input.clone(), None, None, None, None
