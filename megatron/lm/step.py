"""One training step, and one evaluation, on one screen.

What: a step takes a batch of G sequences of S tokens. D data-parallel ranks take G / D sequences each, in G / (D B) micro-batches of B.
In order:

1. Forward and backward of each micro-batch, by megatron-core's schedule. Gradients are the mean over micro-batches of the mean over
   counted tokens. Beside it stand the sum of the losses and the number of counted tokens, which give the exact mean for the log.
2. Gradients leave during the last backward, bucket by bucket (`msamp.comm.grad_sync`); `finish` waits for them.
3. The optimizer clips, updates and, under ZeRO, gathers the weights (`msamp.optim.optimizer`, `msamp.parallel.greedy_zero`).
4. The amax histories of delayed scaling roll, once a step and alike on all ranks that share a layer (`msamp.nn.scaling_state`).
5. The schedule of the learning rate advances, unless the step was skipped.

Shapes on the way, for width h, a vocabulary of V tokens and T tensor-parallel ranks:

    tokens [B, S]
    -> hidden states [S, B, h]           S / T rows a rank with sequence parallelism
    -> logits [S B, V / T]               a chunk of tokens at a time
    -> losses [S B]
    -> loss_sum, tokens: two scalars     FP32: the masked sum, and the number of tokens that count
    -> averaged gradients                flat buckets of whole tensors; under ZeRO a rank gets those that it owns
    -> grad_norm                         FP64 scalar, before clipping

Formats on the way at O2 and O3, where a linear layer has FP8 and everything else 16 or 32 bits:

    hidden states                        BF16
    operands of linear layers            E4M3 forward, E5M2 for grad_output (`msamp.nn.linear`)
    gradients of linear weights          E4M3 with one scale a tensor; several micro-batches add up in BF16 first
    gradients of embeddings, LM head     BF16
    gradients of norms and biases        FP32
    m, v, master                         E4M3, FP16 scaled, FP16 scaled; the update itself is FP32

Why this order: gradients leave while backward still computes, so that the exchange hides behind it. The clip coefficient needs the norm of
all averaged gradients, so that no update can begin before the last bucket. Histories roll after the update and only once, so that all
micro-batches of a step share their delayed scales. That also lets tensor-parallel ranks exchange FP8 activations
without a collective for their scales.

Why nothing here asks the device for a number: the host would wait for all launched kernels. `skipped` is a flag on its way from the
device, and `schedule.settle` reads it one step later. A skipped step changes no weight, no moment, no amax history, no scale of a cast and
no mu on any rank, and its data is consumed. For the same reason the whole step can be replayed as CUDA graphs (`graph`), to the same bits.

One rank takes the same path as many: nothing here asks for the world size but the count of consumed samples.

What was tried: the step eager, as graphs of a micro-batch, and as graphs of the whole step (`--cuda-graph`). The eager step is bound by its
launches, about 25 a millisecond on the machine that was measured: 155 ms at 1.3B and O3, and 95 to 101 as graphs. With
`--no-overlap-grad-reduce` buckets leave after backward. GEMMs and attention take about two thirds of the step; `tools/bench/LOG.md` has
it by kind of kernel.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron.lm.model.gpt import GPT
from megatron.lm.model.loss import mean_loss
from megatron.lm.training.gradients import chunks, count_pipeline_traffic
from megatron.lm.training.state import Batches, StepResult, Training
from msamp.optim.device_flag import DeviceCopy


class Graphs(Protocol):
    """What a step needs of its CUDA graphs: `megatron.lm.graphs.step_graph.StepGraphs`, or `StageGraphs` of a pipeline's."""

    mode: str

    def ready(self) -> bool: ...

    def forward_backward(self, batches: Batches) -> tuple[Tensor, Tensor]: ...

    def update(self) -> Tensor: ...

    def gradients_in_sight(self) -> contextlib.AbstractContextManager[None]: ...


class StepObserver(Protocol):
    """A callback between averaged gradients and update, such as `megatron.lm.run.reports.recorder.Recorder`."""

    def before_update(self) -> None: ...


class RareStepObserver(StepObserver, Protocol):
    """An observer that looks at some steps only, and at their graph as it is: `megatron.lm.run.reports.lost_updates.LostUpdates`."""

    def due(self) -> bool: ...


def train_step(
    training: Training,
    batches: Batches,
    graphs: Graphs | None = None,
    recorder: StepObserver | None = None,
    lost_updates: RareStepObserver | None = None,
) -> StepResult:
    """Micro-batches forward and backward, gradients averaged while backward runs, clipped, the update, new scales.

    A step with a gradient that is not finite changes no weight and does not advance the schedule; its data is consumed. With `graphs`
    the work is replayed once they are ready, to the same bits.
    """
    training.model.train()
    if graphs is not None and not graphs.ready():
        graphs = None
    if graphs is not None:
        loss_sum, tokens = graphs.forward_backward(batches)
    else:
        training.grad_sync.clear()
        loss_sum, tokens = forward_backward(training, batches)
        # Buckets have left during backward: min scale -> FP8 payload -> exchange -> FP32 sum, rounded once by its owner.
        training.grad_sync.finish()

    training.schedule.settle()  # whether the step before this one was skipped has long come from the device
    lr = training.optimizer.param_groups[0]["lr"]
    if recorder is not None:
        recorder.before_update()
    if lost_updates is not None:
        with contextlib.nullcontext() if graphs is None or not lost_updates.due() else graphs.gradients_in_sight():
            lost_updates.before_update()
    if graphs is not None and graphs.mode == "step":
        grad_norm = graphs.update()
    else:
        training.optimizer.step()  # clip -> load -> AdamW in FP32 -> store; under ZeRO on owned tensors, then gather the weights
        grad_norm = training.optimizer.grad_norm
        # Delayed scaling: histories move on, alike for all ranks that share a layer, so that what they send each other has one scale.
        training.scaling.roll(training.grid.scales.group, training.optimizer.usable)
        training.grad_sync.decided(training.optimizer.usable)
        if training.optimizer.shard.ranks == 1:  # under ZeRO weights are still on their way
            training.scaling.measure_weights()
    skipped = training.optimizer.skipped()
    training.schedule.advance_unless(skipped)

    training.iteration += 1
    training.consumed_samples += training.config.global_batch_size(torch.distributed.get_world_size())
    loss_scale = None if training.loss_scaler is None else DeviceCopy(training.loss_scaler.scale(grad_norm.device))
    return StepResult(loss_sum=loss_sum, tokens=tokens, grad_norm=grad_norm, lr=lr, skipped=skipped, loss_scale=loss_scale)


@torch.no_grad()
def evaluate(training: Training, batches: Batches, iterations: int) -> float:
    """Mean loss in nats a token over `iterations` global batches of all ranks. Scales and histories stay as they are."""
    training.model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=next(training.model.parameters()).device)
    with training.grad_sync.sent.uncounted():
        for _ in range(iterations):
            total += torch.stack(forward_backward(training, batches, forward_only=True)).double()
    torch.distributed.all_reduce(total)  # of tensor-parallel ranks all have the same: their ratio does not change
    return float(total[0] / total[1])


def model_output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Forward of a micro-batch: the masked sum of the losses, FP32 0-dim; hidden states [s, b, h] on a stage that is not the last."""
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])


def forward_backward(
    training: Training,
    batches: Batches,
    *,
    forward_only: bool = False,
    forward: Callable[[nn.Module, dict[str, Tensor]], Tensor] = model_output,
) -> tuple[Tensor, Tensor]:
    """megatron-core's schedule over one rank's micro-batches; sums of loss and of counted tokens, on the device."""
    config, parts = training.config, chunks(training.model)
    results = get_forward_backward_func()(
        forward_step_func=functools.partial(_forward_step, forward),
        # Each chunk of an interleaved stage takes every micro-batch.
        data_iterator=batches if len(parts) == 1 else list(itertools.tee(batches, len(parts))),
        model=parts,
        num_microbatches=training.micro_batches,
        seq_length=config.model.seq_length,
        micro_batch_size=config.training.micro_batch_size,
        forward_only=forward_only,
    )
    count_pipeline_traffic(training.grad_sync.sent, config, parts, training.micro_batches)
    if not results:
        nothing = torch.zeros((), device=next(training.model.parameters()).device)
        return nothing, nothing
    return torch.stack([r["loss_sum"] for r in results]).sum(), torch.stack([r["tokens"] for r in results]).sum()


def _forward_step(
    forward: Callable[[nn.Module, dict[str, Tensor]], Tensor], batches: Batches, model: GPT
) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(batches)
    return forward(model, batch), functools.partial(mean_loss, loss_mask=batch["loss_mask"])


def micro_batch_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """`mean_loss` of one micro-batch, without a schedule around it."""
    return mean_loss(model_output(model, batch), batch["loss_mask"])
