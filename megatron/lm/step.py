"""One training step, and one evaluation, on one screen."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron.lm.distributed import chunks, count_pipeline_traffic
from megatron.lm.model.gpt import GPT
from megatron.lm.model.loss import mean_loss
from megatron.lm.training import Batches, StepResult, Training
from msamp.optim.device_flag import DeviceCopy


class Graphs(Protocol):
    """What a step asks of its CUDA graphs (`megatron.lm.graph.StepGraphs`)."""

    mode: str

    def ready(self) -> bool: ...

    def forward_backward(self, batches: Batches) -> tuple[Tensor, Tensor]: ...

    def update(self, group: torch.distributed.ProcessGroup | None) -> Tensor: ...


class Witness(Protocol):
    """What a step tells the recorder (`megatron.lm.recorder.Recorder`): the averaged gradients are there, the update is to come."""

    def before_update(self) -> None: ...


def train_step(training: Training, batches: Batches, graphs: Graphs | None = None, recorder: Witness | None = None) -> StepResult:
    """Micro-batches forward and backward, gradients averaged while backward runs, clipped, the update, new scales.

    A step whose gradient is not finite changes no weight and does not advance the schedule; its data is consumed. With `graphs` the work is
    replayed once they are ready, to the same bits.
    """
    training.model.train()
    graphs = graphs if graphs is not None and graphs.ready() else None
    if graphs is not None:
        loss_sum, tokens = graphs.forward_backward(batches)
    else:
        training.grad_sync.clear()
        loss_sum, tokens = _forward_backward(training, batches, forward_only=False)
        # Buckets have left during backward: min scale -> FP8 payload -> exchange -> FP32 sum, rounded once by its owner.
        training.grad_sync.finish()

    training.schedule.settle()  # whether the step before this one was skipped has long come from the device
    lr = training.optimizer.param_groups[0]["lr"]
    if recorder is not None:
        recorder.before_update()
    sharing = training.grid.scales.group
    if graphs is not None and graphs.mode == "step":
        grad_norm = graphs.update(sharing)
    else:
        training.optimizer.step()  # clip -> load -> AdamW in FP32 -> store; under ZeRO on owned tensors, then gather the weights
        grad_norm = training.optimizer.grad_norm
        # Delayed scaling: histories move on, alike for all who share a layer, so that what they send each other has one scale.
        training.scaling.roll(sharing)
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
            total += torch.stack(_forward_backward(training, batches, forward_only=True)).double()
    torch.distributed.all_reduce(total)  # of tensor-parallel ranks all have the same: their ratio does not change
    return float(total[0] / total[1])


def _forward_backward(training: Training, batches: Batches, forward_only: bool) -> tuple[Tensor, Tensor]:
    """megatron-core's schedule over one rank's micro-batches; sums of loss and of counted tokens, on the device."""
    config, parts = training.config, chunks(training.model)
    results = get_forward_backward_func()(
        forward_step_func=_forward_step,
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


def _forward_step(batches: Batches, model: GPT) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(batches)
    return _loss_sum(model, batch), functools.partial(mean_loss, loss_mask=batch["loss_mask"])


def _loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])


def micro_batch_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """`mean_loss` of one micro-batch, without a schedule around it."""
    return mean_loss(_loss_sum(model, batch), batch["loss_mask"])
