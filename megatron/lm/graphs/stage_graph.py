"""CUDA graphs of a pipeline stage: forward and backward of each micro-batch, between the sends and receives of the stages.

megatron-core's schedule decides when a stage runs which forward and which backward, and sends and receives between them. It calls for a
chunk's output and later for its gradient. Here each of the two is one launch: a graph of the forward, and a graph of its backward.

    received ->  input  --[ forward ]-->  output  -> sent to the next stage
    batch    ->  batch        |
                              | tensors for backward stay in the slot's pool
                              v
    sent back <- grad_input <--[ backward ]--  grad_output <- received

Several micro-batches are in flight at once, so each has a slot with its own input, batch and memory. A micro-batch takes the first free
slot and returns it after its backward, so a chunk has as many slots as micro-batches in flight: P - p on stage p of P without interleaving.
The graphs of a slot never run concurrently and share its memory pool. So the number of graphs does not grow with the number of
micro-batches: each slot has a pair of graphs that accumulates gradients, and one more pair, of a chunk's first micro-batch, starts the
sums.

Forward and backward are both captured at the first request for the forward: a capture computes nothing, and backward directly after forward
sees the memory of the slot's pool as in every replay. Gradient hooks see micro-batches in the order of their forwards, which within a chunk
is the order of their backwards.

Gradients are sent after the pipeline has drained, by a separate graph (`FINISH`), not during the last backward as in eager steps. A
graph completes as a whole: an all-reduce inside the last backward would delay the gradient that the previous stage waits for, and a
collective with other stages would deadlock. Stages that finish early exchange gradients while others still compute.

Unlike `torch.cuda.graph`, capture does not synchronize the device: with interleaved stages a receive may be pending whose sender waits for
this rank.

The results equal eager steps bit for bit: the same work in the same order.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.lm.graphs.replay import Inputs, Replays
from megatron.lm.model.gpt import GPT
from megatron.lm.step import forward_backward, model_output
from megatron.lm.training.gradients import chunks
from megatron.lm.training.state import Batches, Training
from msamp.nn.expert_matrices import one_cast_per_step

FORWARD, BACKWARD, FINISH = "forward", "backward", "finish"


class MicroBatchBuffers(Inputs):
    """The static tensors of one slot, which its graphs read and write.

    Attributes:
        input: hidden states from the previous stage, [s, b, h], with sequence parallelism a slice of s; None on the model's first chunk.
        output: hidden states for the next stage, or the sum of losses, FP32 0-dim.
        result: of forward, until its backward is captured.
        pool: memory pool of the slot's graphs.
    """

    def __init__(self, number: int, input_like: Tensor | None, output_like: Tensor) -> None:
        super().__init__()
        self.number = number
        self.input = None if input_like is None else torch.empty_like(input_like).requires_grad_()
        self.output = torch.empty_like(output_like)
        self.result: Tensor | None = None
        self.pool = torch.cuda.graph_pool_handle()


class Chunk:
    """A chunk of the model on this stage, and the slots of its micro-batches.

    Attributes:
        begun: number of forwards in this step.
        grad_output: gradient of the output, the input of backward.
        grad_input: gradient of the input, the result of backward; None on the model's first chunk.
        source: placeholder input of the first chunk, so that autograd calls its backward.
    """

    def __init__(self, number: int, model: GPT, hidden_shape: tuple[int, int, int]) -> None:
        self.number, self.model = number, model
        device = next(model.parameters()).device
        hidden = torch.empty(hidden_shape, dtype=model.config.pipeline_dtype, device=device)
        self._output_like = torch.empty((), device=device) if model.post_process else hidden
        self.grad_output = torch.empty_like(self._output_like)
        self.grad_input = None if model.pre_process else hidden
        self.source = torch.zeros((), device=device, requires_grad=True)
        self.slots: list[MicroBatchBuffers] = []
        self.begin()

    def begin(self) -> None:
        """Start a step, with no micro-batch in flight."""
        self.begun, self._free = 0, list(self.slots)
        self._under_way: list[MicroBatchBuffers] = []

    def take(self) -> MicroBatchBuffers:
        """Take the first free slot for the next forward."""
        self.begun += 1
        if not self._free:
            self._free = [MicroBatchBuffers(len(self.slots), self.grad_input, self._output_like)]
            self.slots += self._free
        self._under_way.append(self._free.pop(0))
        return self._under_way[-1]

    def give_back(self, slot: MicroBatchBuffers) -> None:
        """Return a slot after its backward.

        Raises:
            RuntimeError: if an earlier micro-batch has not run its backward. The first micro-batch's graph must start the sums.
        """
        if self._under_way.pop(0) is not slot:
            raise RuntimeError("--cuda-graph requires a pipeline schedule that runs backwards in the order of the forwards")
        self._free = sorted([*self._free, slot], key=lambda buffers: buffers.number)


class StageGraphs(Replays):
    """The graphs of a training step on a pipeline stage, interleaved or not.

    Attributes:
        chunks: this rank's chunks of the model, in order.
    """

    def __init__(self, training: Training, mode: str) -> None:
        super().__init__(training, mode)
        self.chunks = [Chunk(number, model, training.hidden_shape) for number, model in enumerate(chunks(training.model))]

    def forward_backward(self, batches: Batches) -> tuple[Tensor, Tensor]:
        """Run all micro-batches of a step and average the gradients; return the sums of loss and of counted tokens, on the device."""
        training = self.training
        training.optimizer.wait()  # for ZeRO's weight gathers: a graph cannot wait for work outside it
        self._begin(FINISH)
        for chunk in self.chunks:
            chunk.begin()
        with one_cast_per_step(self._experts if training.micro_batches > 1 else []):
            result = forward_backward(training, batches, forward=self._output)
        # In the first slot's memory: its activations are dead by now, and the averages are dead before its next forward.
        self._record(FINISH, training.grad_sync.finish, self.chunks[0].slots[0].pool, finishes=True)
        self._launch(FINISH)
        return result

    def _output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return a chunk's output for a micro-batch, with a gradient, for megatron-core's schedule."""
        chunk = next(candidate for candidate in self.chunks if candidate.model is model)
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
            slot.result = model_output(chunk.model, slot.batch)
        slot.output.copy_(slot.result.detach())

    def _backward(self, chunk: Chunk, slot: MicroBatchBuffers) -> None:
        assert slot.result is not None
        with self.training.grad_sync.no_sync():  # `finish` sends the sums
            slot.result.backward(chunk.grad_output)
        slot.result = None
        if slot.input is not None and slot.input.grad is not None and chunk.grad_input is not None:
            chunk.grad_input.copy_(slot.input.grad)
            slot.input.grad = None


class _Replayed(torch.autograd.Function):
    """Forward and backward of a chunk by graphs, as an autograd function."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, graphs: StageGraphs, chunk: Chunk, slot: MicroBatchBuffers, first: bool) -> Tensor:
        ctx.of = (graphs, chunk, slot, first)
        if slot.input is not None:
            slot.input.copy_(received)
        graphs._launch((FORWARD, chunk.number, slot.number, first))
        # Hidden states are sent before the slot's next forward overwrites them; the log keeps a loss for longer.
        return slot.output.clone() if chunk.model.post_process else slot.output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        graphs, chunk, slot, first = ctx.of
        chunk.grad_output.copy_(grad_output)
        graphs._launch((BACKWARD, chunk.number, slot.number, first))
        chunk.give_back(slot)
        # A copy, since it may still be being sent to the previous stage when the next backward overwrites it.
        return None if chunk.grad_input is None else chunk.grad_input.clone(), None, None, None, None
