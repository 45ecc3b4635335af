"""What a training is: the state that a step works on and that a checkpoint keeps, and what a step tells.

Whatever only watches or speeds up the steps (CUDA graphs, the recorder, the watches of a run) holds a `Training` and stands outside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from megatron.lm.config import Config
from megatron.lm.model.fp8_layers import Fp8LayerChoice
from megatron.lm.processes.grid import Grid
from megatron.lm.training.health import Health
from megatron.lm.training.identity import Run
from megatron.lm.training.optimizer import Schedule
from msamp.comm.grad_sync import GradSync
from msamp.fp16.scaler import LossScaler
from msamp.nn.scaling_state import ScalingState
from msamp.optim.device_flag import DeviceCopy, DeviceFlag
from msamp.optim.optimizer import FP8AdamW

Batches = Iterator[dict[str, Tensor]]


@dataclass(kw_only=True)
class Training:
    """What a step works on.

    `model`: this rank's GPT, or the ModuleList of its chunks with interleaved pipeline stages. `linears`: which of its linear layers
    are BF16 in an FP8 recipe, as in `config`, and why. `passed_over`: samples that were read and undone by rollbacks; those of the next
    step begin at `consumed_samples + passed_over`. `loss_scaler`: FP16's, which multiplies the loss in megatron-core's schedule and in
    the graphs, and which the optimizer divides out and updates. `data`: what fixes the order of the training data (`data.order`); None
    where there is none. `run`: its identity, of which rank 0's counts. `health`: how the last step went, as `run.step_watch` saw it.
    """

    config: Config
    grid: Grid
    model: nn.Module
    optimizer: FP8AdamW
    schedule: Schedule
    grad_sync: GradSync
    scaling: ScalingState
    micro_batches: int
    vocab_size: int
    loss_scaler: LossScaler | None = None
    linears: Fp8LayerChoice = field(default_factory=Fp8LayerChoice)
    iteration: int = 0
    consumed_samples: int = 0
    passed_over: int = 0
    data: dict[str, Any] | None = None
    run: Run = field(default_factory=Run)
    health: Health = field(default_factory=Health)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """`loss_sum` and `tokens`: of this rank, on the device, 0 off the last pipeline stage. `grad_norm`: before clipping, FP64.

    `skipped`: on a GPU a flag on its way, which `bool` waits for. `loss_scale`: what the next step takes; None without one.
    """

    loss_sum: Tensor
    tokens: Tensor
    grad_norm: Tensor
    lr: float
    skipped: bool | DeviceFlag
    loss_scale: DeviceCopy | None = None
