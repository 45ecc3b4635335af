"""The training state that a step updates and a checkpoint saves, and the result of a step.

Code that only observes or accelerates steps (CUDA graphs, the recorder, the watches of a run) refers to a `Training` and is not part of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron.lm.config import Config
from megatron.lm.model.fp8_layers import Fp8LayerChoice
from megatron.lm.processes.grid import Grid
from megatron.lm.training.expert_load import ExpertLoad
from megatron.lm.training.optimizer import Schedule
from megatron.lm.training.run_record import Run
from msamp.comm.grad_sync import GradSync
from msamp.fp16.scaler import LossScaler
from msamp.nn.precision_guard import LayerGuard
from msamp.nn.scaling_state import ScalingState
from msamp.optim.device_copy import DeviceCopy
from msamp.optim.optimizer import LowPrecisionOptimizer

Batches = Iterator[dict[str, Tensor]]


@dataclass(kw_only=True)
class Training:
    """The state that a step updates.

    `model`: this rank's GPT, or the ModuleList of its chunks with interleaved pipeline stages. `linears`: which linear layers are BF16 in
    an FP8 recipe, as in `config`, and why. `experts`: load and bias of the experts; empty for a dense model. `passed_over`: samples that
    were read and then undone by rollbacks; the next step reads from `consumed_samples + passed_over`. `loss_scaler`: for FP16;
    megatron-core's schedule and the graphs multiply the loss by its scale, and the optimizer divides by it and updates it. `data`: what
    determines the order of the training data (`data.order`), or None. `run`: the run's identity; rank 0's is saved. `problem`: why a
    checkpoint written now is unhealthy whatever its tensors contain, or None; set by `run.step_watch`. `guard`: with `--fp8-guard`, the
    layers that compute in BF16 for now. `cuda_graph`: the mode of `graphs.step_graph`, and its reason.
    """

    config: Config
    grid: Grid
    model: nn.Module
    optimizer: LowPrecisionOptimizer
    schedule: Schedule
    grad_sync: GradSync
    scaling: ScalingState
    vocab_size: int
    loss_scaler: LossScaler | None = None
    linears: Fp8LayerChoice = field(default_factory=Fp8LayerChoice)
    experts: ExpertLoad = field(default_factory=ExpertLoad)
    iteration: int = 0
    consumed_samples: int = 0
    passed_over: int = 0
    data: dict[str, Any] | None = None
    run: Run = field(default_factory=Run)
    problem: str | None = None
    guard: LayerGuard | None = None
    cuda_graph: tuple[str, str] = ("none", "")

    @property
    def batch_size(self) -> int:
        """Sequences of the next step, of all ranks together."""
        return self.config.global_batch_size(dist.get_world_size(), self.consumed_samples)

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """Shape of a micro-batch's hidden states between two layers of this rank, which it also sends to the next pipeline stage."""
        model = self.config.model
        return self.config.parallel.rows(model.seq_length), self.config.training.micro_batch_size, model.hidden_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the next step, of each rank."""
        return self.config.num_micro_batches(dist.get_world_size(), self.consumed_samples)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """`loss_sum` and `tokens`: of this rank, on the device, 0 before the last pipeline stage. `grad_norm`: before clipping, FP64.

    `skipped`: on a GPU an asynchronous flag; `bool` waits for it. `loss_scale`: of the next step; None without loss scaling.
    `eager`: whether the step ran before the CUDA graphs were ready; None in a run without graphs.
    """

    loss_sum: Tensor
    tokens: Tensor
    grad_norm: Tensor
    lr: float
    skipped: bool | DeviceCopy
    loss_scale: DeviceCopy | None = None
    eager: bool | None = None
