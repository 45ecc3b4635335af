"""One training step and one evaluation on one screen.

A step takes a global batch of G sequences of S tokens. Each of D data-parallel ranks runs G / D of them, in G / (D B) micro-batches of B:

1. megatron-core's schedule runs forward and backward of each micro-batch. Gradients are the mean over micro-batches of the mean over
   counted tokens. The step also returns the sum of the losses and the number of counted tokens, which give the exact mean for the log.
2. Gradients are sent during the last backward, bucket by bucket (`msamp.comm.grad_sync`); `finish` waits for them.
3. The optimizer clips, updates and, under ZeRO, gathers the weights (`msamp.optim.optimizer`, `msamp.parallel.greedy_zero`). The gather
   overlaps with the next forward; graphs leave it to the next step, so other code calls `optimizer.wait()` before it reads weights.
4. The amax histories of delayed scaling roll, once per step, the same on all ranks that share a layer (`msamp.nn.scaling_state`).
5. The learning-rate schedule advances, unless the step was skipped.

Shapes for width h, a vocabulary of V tokens and T tensor-parallel ranks:

    tokens [B, S]
    -> hidden states [S, B, h]           S / T rows per rank with sequence parallelism; BF16
    -> logits [S B, V / T]               a chunk of tokens at a time
    -> losses [S B]
    -> loss_sum, tokens                  two FP32 scalars: the masked sum, and the number of counted tokens
    -> averaged gradients                flat buckets of whole tensors; under ZeRO a rank gets those that it owns
    -> grad_norm                         FP64 scalar, before clipping

Formats at O2 and O3, where linear layers use FP8 and everything else 16 or 32 bits:

    operands of linear layers            E4M3 in forward, E5M2 for grad_output (`msamp.nn.linear`)
    gradients of linear weights          E4M3 with one scale per tensor; micro-batches accumulate in BF16
    gradients of embeddings, LM head     BF16
    gradients of norms and biases        FP32
    m, v, master                         E4M3, scaled FP16, scaled FP16; the update itself is FP32

The order is not free. Sending gradients during backward hides their communication. Clipping needs the norm of all averaged gradients, so no
update can start before the last bucket arrives. Histories roll once, after the update, so that all micro-batches of a step share their
delayed scales, and tensor-parallel ranks can exchange FP8 activations without a collective for the scales.

Nothing here reads a number from the device, because the host would wait for all launched kernels. `skipped` is an asynchronous flag that
`schedule.apply_pending` reads one step later. A skipped step consumes its data, and changes no weight, moment, amax history, cast scale or
mu on any rank. For the same reason CUDA graphs can replay the whole step with the same bits (`megatron.lm.graphs`).
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron.lm.data.documents import DOCUMENTS
from megatron.lm.errors import RunStopped
from megatron.lm.model.gpt import GPT, mean_loss
from megatron.lm.processes.grid import Ranks
from megatron.lm.training.gradients import chunks, count_pipeline_traffic
from megatron.lm.training.state import Batches, StepResult, Training
from msamp.optim.device_copy import DeviceCopy


class Graphs(Protocol):
    """The interface of a step's CUDA graphs: `megatron.lm.graphs.step_graph.StepGraphs`, or `StageGraphs` for pipeline stages."""

    mode: str

    def ready(self) -> bool: ...

    def forward_backward(self, batches: Batches) -> tuple[Tensor, Tensor]: ...

    def update(self) -> Tensor: ...

    def gradients_in_sight(self) -> contextlib.AbstractContextManager[None]: ...


class StepObserver(Protocol):
    """A callback between gradient averaging and the update, such as `megatron.lm.run.reports.recorder.Recorder`."""

    def before_update(self) -> None: ...


class RareStepObserver(StepObserver, Protocol):
    """An observer of some steps only, also when graphs run them: `megatron.lm.run.reports.lost_updates.LostUpdates`."""

    def due(self) -> bool: ...


def train_step(
    training: Training,
    batches: Batches,
    graphs: Graphs | None = None,
    recorder: StepObserver | None = None,
    rare_observers: Sequence[RareStepObserver] = (),
) -> StepResult:
    """Run forward and backward of all micro-batches, average gradients during backward, clip, update and set the next scales.

    A step with a non-finite gradient changes no weight and does not advance the schedule; its data is consumed. Once `graphs` are ready,
    they replay the work with the same bits.
    """
    training.model.train()
    eager = None if graphs is None else not graphs.ready()
    if eager:
        graphs = None
    if graphs is not None:
        loss_sum, tokens = graphs.forward_backward(batches)
    else:
        if training.optimizer.shard.deferred:  # by the graphs of the step before
            training.optimizer.wait()
        training.grad_sync.clear()
        loss_sum, tokens = forward_backward(training, batches)
        # Buckets were sent during backward: min scale -> FP8 payload -> exchange -> FP32 sum, rounded once by its owner.
        training.grad_sync.finish()

    training.schedule.apply_pending()  # by now the device has long reported whether the previous step was skipped
    lr = training.optimizer.param_groups[0]["lr"]
    if recorder is not None:
        recorder.before_update()
    for observer in rare_observers:
        with contextlib.nullcontext() if graphs is None or not observer.due() else graphs.gradients_in_sight():
            observer.before_update()
    if graphs is not None and graphs.mode == "step":
        grad_norm = graphs.update()
    else:
        training.optimizer.step()  # clip -> load -> AdamW in FP32 -> store; under ZeRO on owned tensors, then gather the weights
        grad_norm = training.optimizer.grad_norm
        # Delayed scaling: roll the histories, the same on all ranks that share a layer, so that what they send each other has one scale.
        grid = training.grid
        training.scaling.roll(grid.scales.group, training.optimizer.usable, copies=grid.copies.group)
        training.grad_sync.decided(training.optimizer.usable)
        training.experts.end_step(training.optimizer.usable)
        if training.optimizer.shard.ranks == 1:  # under ZeRO weights are still being gathered
            training.scaling.measure_weights()
    skipped = training.optimizer.skipped()
    training.schedule.advance_unless(skipped, training.batch_size)

    training.iteration += 1
    training.consumed_samples += training.batch_size
    loss_scale = None if training.loss_scaler is None else DeviceCopy(training.loss_scaler.scale(grad_norm.device))
    return StepResult(loss_sum=loss_sum, tokens=tokens, grad_norm=grad_norm, lr=lr, skipped=skipped, loss_scale=loss_scale, eager=eager)


@torch.no_grad()
def evaluate(training: Training, batches: Batches, iterations: int) -> float:
    """Return the mean loss, in nats per token, over `iterations` global batches of all ranks. Scales and histories do not change.

    Raises:
        RunStopped: on every rank, if no token counts.
    """
    training.model.eval()
    training.optimizer.wait()
    total = torch.zeros(2, dtype=torch.float64, device=next(training.model.parameters()).device)
    with training.grad_sync.sent.uncounted():
        for _ in range(iterations):
            total += torch.stack(forward_backward(training, batches, forward_only=True)).double()
    torch.distributed.all_reduce(total)  # tensor-parallel ranks have the same values, so the ratio is unchanged
    if not total[1]:
        raise RunStopped(
            f"the evaluation of {iterations} iterations has no token that counts in the loss: all are masked, for example end-of-document "
            "tokens by --eod-mask-loss. Check the data, or train without it"
        )
    return float(total[0] / total[1])


def model_output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Run forward of a micro-batch: the masked sum of the losses, FP32 0-dim; hidden states [s, b, h] on all pipeline stages but the
    last."""
    documents = batch.get(DOCUMENTS)  # with --reset-attention-mask
    mask = None if documents is None else model.document_mask(documents)  # type: ignore[operator]
    return model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"], loss_mask=batch["loss_mask"])


def forward_backward(
    training: Training,
    batches: Batches,
    *,
    forward_only: bool = False,
    forward: Callable[[nn.Module, dict[str, Tensor]], Tensor] = model_output,
) -> tuple[Tensor, Tensor]:
    """Run megatron-core's schedule over this rank's micro-batches; return the sums of loss and of counted tokens, on the device.

    `forward_only`: take the micro-batches of a whole global batch, while a training step may have fewer (`--rampup-batch-size`).
    """
    micro_batches = training.micro_batches
    if forward_only:
        micro_batches = training.config.num_micro_batches(torch.distributed.get_world_size())
    config, parts = training.config, chunks(training.model)
    results = get_forward_backward_func()(
        forward_step_func=functools.partial(_forward_step, forward, training.grid.context),
        # Each chunk of an interleaved stage takes every micro-batch.
        data_iterator=batches if len(parts) == 1 else list(itertools.tee(batches, len(parts))),
        model=parts,
        num_microbatches=micro_batches,
        seq_length=config.model.seq_length,
        micro_batch_size=config.training.micro_batch_size,
        forward_only=forward_only,
    )
    count_pipeline_traffic(training.grad_sync.sent, training.hidden_shape, parts, micro_batches)
    if not results:
        nothing = torch.zeros((), device=next(training.model.parameters()).device)
        return nothing, nothing
    return torch.stack([r["loss_sum"] for r in results]).sum(), torch.stack([r["tokens"] for r in results]).sum()


def _forward_step(
    forward: Callable[[nn.Module, dict[str, Tensor]], Tensor], context: Ranks, batches: Batches, model: GPT
) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(batches)
    return forward(model, batch), functools.partial(_scheduled_loss, loss_mask=batch["loss_mask"], context=context)


def _scheduled_loss(loss_sum: Tensor, loss_mask: Tensor, context: Ranks) -> tuple[Tensor, dict[str, Tensor]]:
    """`mean_loss` for the schedule, which multiplies a loss function of two values by the number of context-parallel ranks."""
    mean, report = mean_loss(loss_sum, loss_mask, context)
    return mean / context.size if context.size > 1 else mean, report


def micro_batch_loss(training: Training, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `mean_loss` of one micro-batch, without a pipeline schedule."""
    return mean_loss(model_output(training.model, batch), batch["loss_mask"], training.grid.context)
