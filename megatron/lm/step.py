"""One training step, and one evaluation, on one screen."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron.lm.config import Config
from megatron.lm.distributed import chunks, count_pipeline_traffic
from megatron.lm.model.gpt import GPT
from megatron.lm.model.loss import masked_mean_loss
from msamp.comm.grad_sync import GradSync
from msamp.nn.scaling_state import ScalingState
from msamp.optim.adamw import FP8AdamW

Batches = Iterator[dict[str, Tensor]]


@dataclass(kw_only=True)
class Training:
    """What a step works on. `model`: this rank's GPT, or the ModuleList of its chunks with interleaved pipeline stages."""

    config: Config
    model: nn.Module
    optimizer: FP8AdamW
    schedule: OptimizerParamScheduler
    grad_sync: GradSync
    scaling: ScalingState
    micro_batches: int
    vocab_size: int
    iteration: int = 0
    consumed_samples: int = 0


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """`loss_sum` and `tokens`: of this rank, on the device, 0 off the last pipeline stage. `grad_norm`: before clipping, FP64."""

    loss_sum: Tensor
    tokens: Tensor
    grad_norm: Tensor
    lr: float
    skipped: bool


def train_step(training: Training, batches: Batches) -> StepResult:
    """Micro-batches forward and backward, gradients averaged while backward runs, clipped, the update, new scales.

    A step whose gradient is not finite changes no weight and does not advance the schedule; its data is consumed.
    """
    training.model.train()
    training.grad_sync.clear()
    loss_sum, tokens = _forward_backward(training, batches, forward_only=False)

    # Buckets have left during backward: min scale -> FP8 payload -> exchange -> FP32 sum, rounded once by its owner.
    training.grad_sync.finish()

    skipped_before = training.optimizer.skipped_steps
    lr = training.optimizer.param_groups[0]["lr"]
    training.optimizer.step()  # clip -> load -> AdamW in FP32 -> store; under ZeRO on owned tensors, then gather the weights
    skipped = training.optimizer.skipped_steps > skipped_before
    if not skipped:
        training.schedule.step(1)

    # Delayed scaling: histories move on, alike for all who share a layer, so that what they send each other has one scale.
    training.scaling.roll(parallel_state.get_tensor_and_data_parallel_group())

    training.iteration += 1
    training.consumed_samples += training.config.global_batch_size(torch.distributed.get_world_size())
    return StepResult(loss_sum=loss_sum, tokens=tokens, grad_norm=training.optimizer.grad_norm, lr=lr, skipped=skipped)


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
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, functools.partial(masked_mean_loss, loss_mask=batch["loss_mask"])
