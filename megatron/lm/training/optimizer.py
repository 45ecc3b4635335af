"""The trainer's optimizer and learning-rate schedule: which parameter gets which formats, and decay or none."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from megatron.lm.config import Config
from megatron.lm.model.initial import parameter_names
from megatron.lm.model.linear import FP8Gemm
from megatron.lm.processes.grid import Grid
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.comm.grad_sync import GradSync
from msamp.fp16.scaler import LossScaler
from msamp.numerics import formats
from msamp.numerics.recipe import KINDS, Recipe
from msamp.numerics.stochastic_rounding import tensor_key
from msamp.optim.device_flag import DeviceFlag
from msamp.optim.kept_states import kept_states, update_of
from msamp.optim.optimizer import FP8AdamW
from msamp.optim.states import parameter_kind, weight_format
from msamp.optim.updates import MASTER, WEIGHT, formats_of
from msamp.parallel.greedy_zero import ZeRO


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Up to three groups: linear weights, other matrices (embeddings, LM head), vectors (norms, biases).

    Matrices decay; vectors do not (as in Megatron-LM). Their formats: `Recipe.formats_of`.
    """
    by_kind: dict[str, list[nn.Parameter]] = {kind: [] for kind in KINDS}
    for p in model.parameters():
        by_kind[parameter_kind(p)].append(p)
    decays = {"linear": 1.0, "matrix": 1.0, "vector": 0.0}
    return [{"params": params, "formats": recipe.formats_of(kind), "wd_mult": decays[kind]} for kind, params in by_kind.items() if params]


def rounding_keys(model: nn.Module, seed: int) -> dict[Tensor, int]:
    """The key of every parameter's thresholds for stochastic rounding, by its name in the whole model and, where it is a tensor-parallel
    shard, by its rank. Copies of a parameter have one key: those of data-parallel ranks, norms under tensor parallelism, and a tied
    embedding on the first and the last stage."""
    rank, names = Grid.current().tensor.rank, parameter_names(model)
    return {p: tensor_key(seed, name, rank if getattr(p, "tensor_model_parallel", False) else 0) for p, name in names.items()}


def build_loss_scaler(config: Config, recipe: Recipe) -> LossScaler | None:
    """The loss scale of FP16, constant with `--loss-scale`; None for a recipe that needs none.

    A dynamic one may fall below `--min-loss-scale` by one halving, which ends the run.
    """
    if not recipe.scales_loss:
        return None
    precision = config.precision
    return LossScaler(
        "dynamic" if precision.loss_scale is None else precision.loss_scale,
        init_scale=precision.initial_loss_scale,
        growth_interval=precision.loss_scale_window,
        min_loss_scale=precision.min_loss_scale / 2,
        max_loss_scale=2.0**32,
        hysteresis=precision.hysteresis,
        in_place=True,
    )


def build_optimizer(
    model: nn.Module, config: Config, recipe: Recipe, grad_sync: GradSync, loss_scaler: LossScaler | None = None
) -> FP8AdamW:
    """The optimizer of this rank: all states, or under ZeRO those of the tensors it owns; `loss_scaler` as `build_loss_scaler` gives it."""
    optim = config.optimizer
    settings: dict[str, Any] = {
        "lr": optim.lr,
        "betas": (optim.adam_beta1, optim.adam_beta2),
        "eps": optim.adam_eps,
        "weight_decay": optim.weight_decay,
        "clip_grad": optim.clip_grad or None,
        "loss_scale": loss_scaler,
    }
    groups, keys = parameter_groups(model, recipe), rounding_keys(model, config.training.seed)
    for group in groups:
        group["keys"] = [keys[p] for p in group["params"]]
    settings["combine_norms"] = global_norm([p for group in groups for p in group["params"]])
    shard = ZeRO(grad_sync, config.communication.overlap_param_gather) if grad_sync.shard else None
    optimizer = FP8AdamW(groups, shard=shard, **settings)
    for layer in model.modules():
        values = layer.take_initial_weight() if isinstance(layer, FP8Gemm) else None
        if values is not None:
            optimizer.init_master(layer.weight, values)  # type: ignore[arg-type]
    return optimizer


def global_norm(params: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """For an optimizer of `params`: their FP64 [n] gradient norms -> the norm over the whole grid, every tensor counted once."""
    grid = Grid.current()
    peers = Peers(grid.model.group, WireBytes())
    counts = [grid.counts(p, every_copy=True) for p in params]
    counted = torch.tensor(counts, dtype=torch.float64, device=params[0].device)

    def combine(norms: Tensor) -> Tensor:
        if peers.ranks == 1:
            return torch.linalg.vector_norm(norms)
        # Not selected but multiplied: a copy that is not finite shows as well. Gathered and added in rank order: data-parallel copies
        # of the grid must come to the same bits, over whatever rings their sums would have gone.
        total = (norms.square() * counted).sum().reshape(1)
        return peers.all_gather(total, [1] * peers.ranks, "the gradient norm of the grid").sum().sqrt()

    return combine


class Schedule(OptimizerParamScheduler):
    """megatron-core's schedule, which does not wait to hear whether a step counts."""

    _skipped: bool | DeviceFlag = True  # the last step that `advance_unless` has told of and `settle` has not

    def advance_unless(self, skipped: bool | DeviceFlag) -> None:
        """Move on by one step unless `skipped`: at once where that is known, else with the next `settle`."""
        self._skipped = skipped
        if isinstance(skipped, bool):
            self.settle()

    def settle(self) -> None:
        """Be where the steps so far have led to; waits for the last one's flag."""
        skipped, self._skipped = self._skipped, True
        if not skipped:
            self.step(1)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return super().state_dict()


def build_schedule(optimizer: FP8AdamW, config: Config) -> Schedule:
    """megatron-core's schedule, counted in iterations: linear warm-up from 0, then the decay of `--lr-decay-style`."""
    optim = config.optimizer
    return Schedule(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.lr_warmup_iters,
        lr_decay_steps=config.lr_decay_iters,
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=config.lr_decay_iters,
        wd_incr_style="constant",
    )


def bytes_per_parameter(optimizer: FP8AdamW) -> dict[str, float]:
    """Mean bytes a parameter of the model that each kind of state takes on this rank, by its format.

    Keys: weight, master (0 where the weight is its own), grad: the gradient that the optimizer takes (while several micro-batches are
    summed it is wider where it will be FP8), and the columns of the update's states, such as m and v; a remainder counts with its first
    component. Under ZeRO a rank has master, gradient and states of what it owns, and all weights.
    """
    total = dict.fromkeys((WEIGHT, MASTER.column, "grad"), 0)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        total[WEIGHT] += p.numel() * weight_format(p).bytes
    for state in (state for group in optimizer.param_groups for kind in formats_of(group) for state in update_of(kind).states):
        total.setdefault(state.column, 0)
    for holding in optimizer.holdings():
        shape = holding.weight.shape
        total["grad"] += formats.by_name(holding.formats["grad"]).bytes_of(shape)
        for state, fmt in kept_states(holding.param, holding.formats):
            total[state.column] += fmt.bytes_of(shape)
    count = sum(p.numel() for p in params)
    return {key: size / count for key, size in total.items()}
