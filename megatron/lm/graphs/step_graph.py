"""CUDA graphs of a training step: forward and backward of a micro-batch, and the optimizer's step, each replayed as one launch.

This file contains the checks, the choice of a mode, and the graphs of a rank with all layers. `megatron.lm.graphs.replay` contains the code
that all graphs share, and `megatron.lm.graphs.stage_graph` the graphs of a pipeline stage.
"""

import contextlib
import functools
import importlib.util

import torch
from torch import Tensor

from megatron.lm.config import ModelConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from megatron.lm.graphs import capture
from megatron.lm.graphs.replay import Inputs, Replays
from megatron.lm.graphs.stage_graph import StageGraphs
from megatron.lm.model.moe.router import scale_losses
from megatron.lm.processes import process_groups
from megatron.lm.step import micro_batch_loss
from megatron.lm.training.state import Batches, Training
from msamp.kernels.cuda_graph import unregistrable
from msamp.nn.expert_layer import has_grouped_kernel
from msamp.nn.expert_matrices import one_cast_per_step
from msamp.parallel.greedy_zero import ZeRO

GATHERS_AHEAD = 3  # buckets of weights that a forward's graph gathers before it reads the first
FIRST, MIDDLE, LAST, ONLY = "first", "middle", "last", "only"  # positions of a micro-batch in a step


def obstacle(model: ModelConfig, parallel: ParallelConfig, precision: PrecisionConfig, training: TrainingConfig) -> str | None:
    """Return why the steps of this run cannot be captured on this machine, or None if they can."""
    plain_experts = len(precision.fp8_experts(model)) < len(model.moe_layers)
    obstacles = {
        "there is no GPU": not torch.cuda.is_available(),
        "Triton is not installed": importlib.util.find_spec("triton") is None,
        "gloo's collectives run on the host": torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo",
        "here PyTorch has no kernel for BF16 experts and multiplies them one by one, by sizes that the host reads": (
            plain_experts and torch.cuda.is_available() and not has_grouped_kernel()
        ),
    }
    return (
        next((reason for reason, holds in obstacles.items() if holds), None)
        or capture.obstacle(model, parallel, precision, training)
        or unregistrable()
    )


def choose(model: ModelConfig, parallel: ParallelConfig, precision: PrecisionConfig, training: TrainingConfig) -> tuple[str, str]:
    """Return the mode and its reason: the value of `--cuda-graph`, or by default "step" if it is possible.

    Raises:
        ValueError: if the flag requests graphs and they are impossible.
    """
    asked, reason = training.cuda_graph, obstacle(model, parallel, precision, training)
    if asked == "none":
        return "none", "--cuda-graph none"
    if reason is None:
        stages = " of a stage, by micro-batch" if parallel.pipeline_model_parallel_size > 1 else ""
        return asked or "step", f"forward and backward{stages}" if asked == "micro-batch" else f"forward and backward{stages}, and update"
    if asked is not None:
        raise ValueError(f"--cuda-graph {asked}: CUDA graphs cannot be captured because {reason}; use --cuda-graph none, or drop the flag")
    return "none", reason


def build(training: Training) -> "StepGraphs | StageGraphs | None":
    """Build the graphs for `train_step`; None for eager steps."""
    mode, _ = training.cuda_graph
    if mode == "none":
        return None
    return StepGraphs(training, mode) if training.grid.pipeline.size == 1 else StageGraphs(training, mode)


class StepGraphs(Replays):
    """The graphs of a training step with one pipeline stage, which share one memory pool.

    The first micro-batch of a step clears the gradients, the last sends them, those between only accumulate: up to three graphs, and one of
    the update, each captured at its first use.

    In mode "step" with `--overlap-param-gather`, under ZeRO, the first graph starts to gather the weights of the update before, a few
    buckets ahead of the modules that wait for them: the all-gather overlaps with the forward. The graph gathers them also where
    something has gathered them before it, such as an evaluation; that changes no bit.
    """

    def __init__(self, training: Training, mode: str) -> None:
        super().__init__(training, mode)
        self._inputs = Inputs()
        self._sums = torch.zeros(2, device=process_groups.device())  # sums of a micro-batch: loss, counted tokens
        shard = training.optimizer.shard
        if mode == "step" and isinstance(shard, ZeRO) and shard.overlaps:
            self.zero = shard

    def forward_backward(self, batches: Batches) -> tuple[Tensor, Tensor]:
        """Run all micro-batches of a step and average the gradients; return the sums of loss and of counted tokens, on the device."""
        count = self.training.micro_batches
        places = [ONLY] if count == 1 else [FIRST, *([MIDDLE] * (count - 2)), LAST]
        if self.zero is None or not self.zero.deferred:
            self.training.optimizer.wait()  # for ZeRO's weight gathers: a graph cannot wait for work outside it
        self._begin(places[0])  # otherwise the 25 GiB of gradients of 7B at O0 exceed 139 GiB, of which 112 are in use between steps
        if self.training.experts.routers:
            scaler, context = self.training.loss_scaler, self.training.grid.context.size
            scale_losses(count, None if scaler is None else scaler.multiply, context)  # without a schedule, which sets it in eager steps
        sums = []
        with one_cast_per_step(self._experts if count > 1 else []):
            for place in places:
                self._inputs.fill(next(batches))
                self._record(place, functools.partial(self._micro_batch, place), finishes=place in (LAST, ONLY))
                self._launch(place)
                if self.zero is not None:
                    self.zero.deferred = False
                sums.append(self._sums.clone())
        loss_sums, tokens = zip(*(x.unbind() for x in sums), strict=True)
        return torch.stack(loss_sums).sum(), torch.stack(tokens).sum()

    def _micro_batch(self, place: str) -> None:
        sync = self.training.grad_sync
        zero = self.zero if place in (FIRST, ONLY) else None
        if place in (FIRST, ONLY):
            sync.clear()
        if zero is not None:
            zero.start_gather(GATHERS_AHEAD)
        with contextlib.nullcontext() if place in (LAST, ONLY) else sync.no_sync():
            mean, sums = micro_batch_loss(self.training, self._inputs.batch)
            if zero is not None:
                zero.wait()  # for weights that this forward did not read, too: a graph ends with all of its streams joined
            share, scaler = mean / self.training.micro_batches, self.training.loss_scaler
            (share if scaler is None else scaler.multiply(share)).backward()
            self._sums.copy_(torch.stack([sums["loss_sum"], sums["tokens"]]))
        if place in (LAST, ONLY):
            sync.finish()
        else:
            sync.wait()  # for what the owners sum up: a capture ends with no other stream in it
