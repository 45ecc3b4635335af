"""CUDA graphs of a training step: forward and backward of a micro-batch, and the optimizer's step, each replayed as one launch.

`megatron.lm.graphs.replay` says what stands beside a replay. Here are what can be captured, the choice, and the graphs of a rank that has
the whole stack of layers; a stage of a pipeline has its own (`megatron.lm.graphs.stage_graph`).
"""

import contextlib
import functools
import importlib.util

import torch
from torch import Tensor

from megatron.lm.config import Config
from megatron.lm.graphs import capture
from megatron.lm.graphs.replay import Inputs, Replays
from megatron.lm.graphs.stage_graph import StageGraphs
from megatron.lm.processes import process_groups
from megatron.lm.step import micro_batch_loss
from megatron.lm.training.state import Batches, Training

UNASKED = "pipeline stages replay graphs where --cuda-graph step or micro-batch asks for it: over NCCL they are new"
FIRST, MIDDLE, LAST, ONLY = "first", "middle", "last", "only"  # micro-batches of a step by their place


def obstacle(config: Config) -> str | None:
    """Why the steps of this run cannot be captured here; None where they can."""
    found = {
        "there is no GPU": not torch.cuda.is_available(),
        "Triton is not installed": importlib.util.find_spec("triton") is None,
        "gloo's collectives run on the host": torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo",
    }
    return next((reason for reason, holds in found.items() if holds), None) or capture.obstacle(config)


def choose(config: Config) -> tuple[str, str]:
    """(mode, why it is that): what `--cuda-graph` asks for, or "step" where nothing stands in the way and there is one pipeline stage.

    Raises:
        ValueError: graphs are asked for where there can be none.
    """
    asked, reason = config.training.cuda_graph, obstacle(config)
    if asked == "none":
        return "none", "--cuda-graph none"
    if reason is None and not capture.captured(config):
        return "none", UNASKED
    if reason is None:
        stages = " of a stage, by micro-batch" if config.parallel.pipeline_model_parallel_size > 1 else ""
        return asked or "step", f"forward and backward{stages}" if asked == "micro-batch" else f"forward and backward{stages}, and update"
    if asked is not None:
        raise ValueError(f"--cuda-graph {asked}: no graph can be captured, since {reason}; use --cuda-graph none, or drop the flag")
    return "none", reason


def build(training: Training) -> "StepGraphs | StageGraphs | None":
    """The graphs of a training's steps, for `train_step`; None where they are eager (`choose`).

    Raises:
        ValueError: as `choose`.
    """
    mode, _ = choose(training.config)
    if mode == "none":
        return None
    return StepGraphs(training, mode) if training.grid.pipeline.size == 1 else StageGraphs(training, mode)


class StepGraphs(Replays):
    """The graphs of a training step on one pipeline stage, which share one memory pool.

    The first micro-batch of a step clears the gradients, the last sends them off, those between only add to them: up to three
    graphs, and one of the update, each captured when it is first needed.

    Args:
        training: what is trained, on one pipeline stage.
        mode: as `Replays`.
    """

    def __init__(self, training: Training, mode: str) -> None:
        super().__init__(training, mode)
        self._inputs = Inputs()
        self._sums = torch.zeros(2, device=process_groups.device())  # of a micro-batch: loss, counted tokens

    def forward_backward(self, batches: Batches) -> tuple[Tensor, Tensor]:
        """All micro-batches of a step, their gradients averaged: sums of loss and of counted tokens, on the device."""
        count = self.training.micro_batches
        places = [ONLY] if count == 1 else [FIRST, *([MIDDLE] * (count - 2)), LAST]
        self.training.optimizer.wait()  # under ZeRO for weights on their way: a graph cannot wait for what began outside it
        if not self._known(places[0]):  # now, so that their memory is free for the graphs' pool, which takes none that is freed in a
            self.training.grad_sync.clear()  # capture (7B at O0, 25 GiB of gradients: out of 139 GiB where 112 are at rest)
        sums = []
        for place in places:
            self._inputs.fill(next(batches))
            self._record(place, functools.partial(self._micro_batch, place), finishes=place in (LAST, ONLY))
            self._launch(place)
            sums.append(self._sums.clone())
        loss_sums, tokens = zip(*(found.unbind() for found in sums), strict=True)
        return torch.stack(loss_sums).sum(), torch.stack(tokens).sum()

    def _micro_batch(self, place: str) -> None:
        sync = self.training.grad_sync
        if place in (FIRST, ONLY):
            sync.clear()
        with contextlib.nullcontext() if place in (LAST, ONLY) else sync.no_sync():
            mean, found = micro_batch_loss(self.training.model, self._inputs.batch)
            share, scaler = mean / self.training.micro_batches, self.training.loss_scaler
            (share if scaler is None else scaler.multiply(share)).backward()
            self._sums.copy_(torch.stack([found["loss_sum"], found["tokens"]]))
        if place in (LAST, ONLY):
            sync.finish()
