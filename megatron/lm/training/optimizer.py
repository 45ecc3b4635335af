"""The trainer's optimizer and learning-rate schedule: formats and weight decay of each parameter."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from megatron.lm.config import OptimizerConfig, PrecisionConfig
from megatron.lm.config.whole import ScheduleSteps
from megatron.lm.model.initial import parameter_names, take_initial_weights
from megatron.lm.processes.grid import Grid, is_expert
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.comm.grad_sync import GradSync
from msamp.fp16.scaler import LossScaler
from msamp.numerics import formats
from msamp.numerics.recipe import KINDS, Recipe
from msamp.numerics.stochastic_rounding import tensor_key
from msamp.optim.device_copy import DeviceCopy
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.states import parameter_kind, weight_format
from msamp.optim.updates import MASTER, WEIGHT, formats_of, kept_states, update_of
from msamp.parallel.greedy_zero import ZeRO


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Return up to three groups: linear weights, other matrices (embeddings, LM head), vectors (norms, biases).

    Matrices have weight decay, vectors do not, as in Megatron-LM. Formats come from `Recipe.formats_of`.
    """
    by_kind: dict[str, list[nn.Parameter]] = {kind: [] for kind in KINDS}
    for p in model.parameters():
        by_kind[parameter_kind(p)].append(p)
    decays = {"linear": 1.0, "matrix": 1.0, "vector": 0.0}
    return [{"params": params, "formats": recipe.formats_of(kind), "wd_mult": decays[kind]} for kind, params in by_kind.items() if params]


def decouple(groups: Sequence[dict[str, Any]], optim: OptimizerConfig) -> list[dict[str, Any]]:
    """Return the groups, with separate ones for word embedding and LM head if `--decoupled-lr` gives them another learning rate.

    megatron-core marks these parameters, and its schedule reads `max_lr` and `min_lr` of a group.
    """
    if optim.decoupled_lr is None:
        return list(groups)
    least = optim.min_lr if optim.decoupled_min_lr is None else optim.decoupled_min_lr
    groups_by_rate = []
    for group in groups:
        apart = [p for p in group["params"] if getattr(p, "is_embedding_or_output_parameter", False)]
        rest = [p for p in group["params"] if not getattr(p, "is_embedding_or_output_parameter", False)]
        groups_by_rate += [group | {"params": rest}] if rest else []
        groups_by_rate += [group | {"params": apart, "max_lr": optim.decoupled_lr, "min_lr": least}] if apart else []
    return groups_by_rate


def rounding_keys(model: nn.Module, seed: int) -> dict[Tensor, int]:
    """Return each parameter's key for the thresholds of stochastic rounding, from its name in the whole model and, for a shard of a
    tensor-parallel layer or of the experts, its rank. Copies of a parameter share a key: copies on data-parallel ranks, norms under tensor
    parallelism, and a tied embedding on the first and last stage."""
    grid = Grid.current()

    def rank(p: Tensor) -> int:
        if is_expert(p):
            return grid.experts.rank
        return grid.tensor.rank if getattr(p, "tensor_model_parallel", False) else 0

    return {p: tensor_key(seed, name, rank(p)) for p, name in parameter_names(model).items()}


def build_loss_scaler(precision: PrecisionConfig, recipe: Recipe) -> LossScaler | None:
    """Build FP16's loss scaler, constant with `--loss-scale`; None for a recipe without loss scaling.

    A dynamic scale may fall below `--min-loss-scale` by one halving, which ends the run.
    """
    if not recipe.scales_loss:
        return None
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
    model: nn.Module,
    optim: OptimizerConfig,
    recipe: Recipe,
    grad_sync: GradSync,
    loss_scaler: LossScaler | None = None,
    *,
    seed: int,
    overlap_param_gather: bool,
) -> LowPrecisionOptimizer:
    """Build this rank's optimizer, with all states, or under ZeRO the states of the tensors it owns.

    Args:
        model: of this rank.
        optim, recipe: of the run.
        grad_sync: defines what this rank owns.
        loss_scaler: from `build_loss_scaler`.
        seed: of stochastic rounding.
        overlap_param_gather: whether ZeRO gathers weights while the next forward runs.
    """
    settings: dict[str, Any] = {
        "lr": optim.lr,
        "betas": (optim.adam_beta1, optim.adam_beta2),
        "eps": optim.adam_eps,
        "weight_decay": optim.weight_decay,
        "clip_grad": optim.clip_grad or None,
        "loss_scale": loss_scaler,
    }
    groups, keys = decouple(parameter_groups(model, recipe), optim), rounding_keys(model, seed)
    options: dict[str, dict[str, Any]] = {
        "sgd-momentum": {"momentum": optim.sgd_momentum, "decoupled": False},  # decay by the gradient, as in torch and Megatron-LM
        "muon": {"momentum": optim.muon_momentum, "adjust_lr_fn": "match_rms_adamw"},  # steps of AdamW's size: --lr serves both
    }
    for group in groups:
        for p in group["params"] if group["formats"].update == "muon" else ():
            p.tensor_model_parallel = False  # megatron-core marks whole matrices too; rules.toml refuses parts
        group |= options.get(group["formats"].update, {}) | {"keys": [keys[p] for p in group["params"]]}
    settings["combine_norms"] = global_norm([p for group in groups for p in group["params"]])
    shard = ZeRO(grad_sync, overlap_param_gather) if grad_sync.shard else None
    optimizer = LowPrecisionOptimizer(groups, shard=shard, **settings)
    optimizer.init_masters(take_initial_weights(model))
    return optimizer


def global_norm(params: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function from the gradient norms of `params`, FP64 [n], to the norm over the whole grid, counting every tensor once."""
    grid = Grid.current()
    counts = [grid.counts(p, every_copy=True) for p in params]
    # One sum over the ranks of each kind of parameter, in the same order on all ranks, also on those without experts.
    kinds = list(dict.fromkeys((grid.model, grid.expert_model)))
    sums = []
    for ranks in kinds:
        own = [count and grid.parts(p) == ranks for count, p in zip(counts, params, strict=True)]
        sums.append((Peers(ranks.group, WireBytes()), torch.tensor(own, dtype=torch.float64, device=params[0].device)))

    def combine(norms: Tensor) -> Tensor:
        if all(peers.ranks == 1 for peers, _ in sums):
            return torch.linalg.vector_norm(norms)
        totals = []
        for peers, counted in sums:
            # Multiplying by 0 instead of selecting keeps non-finite copies visible. An all-gather and a sum in rank order gives all
            # replicas the same bits, which an all-reduce may not.
            total = (norms.square() * counted).sum().reshape(1)
            totals.append(peers.all_gather(total, [1] * peers.ranks, "the gradient norm of the grid").sum())
        return sum(totals[1:], totals[0]).sqrt()

    return combine


class Schedule(OptimizerParamScheduler):
    """megatron-core's schedule, without waiting for the device to report whether a step was skipped."""

    _skipped: bool | DeviceCopy = True  # for the last step of `advance_unless`, until `apply_pending` applies it
    _samples = 0  # sequences of that step
    in_samples = False  # whether the schedule counts samples, instead of iterations

    def advance_unless(self, skipped: bool | DeviceCopy, samples: int) -> None:
        """Advance by one iteration of `samples` sequences unless `skipped`: at once if that is known, else in the next `apply_pending`."""
        self._skipped, self._samples = skipped, samples
        if isinstance(skipped, bool):
            self.apply_pending()

    def apply_pending(self) -> None:
        """Apply the last recorded step; waits for its flag."""
        skipped, self._skipped = self._skipped, True
        if not skipped:
            self.step(self._samples if self.in_samples else 1)

    def state_dict(self) -> dict[str, Any]:
        self.apply_pending()
        return super().state_dict()


def build_schedule(optimizer: LowPrecisionOptimizer, optim: OptimizerConfig, steps: ScheduleSteps) -> Schedule:
    """Build megatron-core's schedule, in iterations or with `--train-samples` in samples: linear warm-up, then `--lr-decay-style`."""
    schedule = Schedule(
        optimizer,
        init_lr=optim.lr_warmup_init,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=steps.warmup,
        lr_decay_steps=steps.decay,
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=steps.decay,
        wd_incr_style="constant",
        wsd_decay_steps=steps.wsd,
        lr_wsd_decay_style=optim.lr_wsd_decay_style,
    )
    schedule.in_samples = steps.in_samples
    return schedule


def bytes_per_parameter(optimizer: LowPrecisionOptimizer) -> dict[str, float]:
    """Return the mean bytes per parameter of each kind of state on this rank, from their formats.

    Keys: weight; master (0 if the weight is its own master); grad, the gradient that the optimizer reads (an FP8 gradient is wider while
    micro-batches accumulate); and the columns of the update's states, such as m and v, where a remainder counts with its first component.
    Under ZeRO a rank has all weights, but master, gradient and states only of the tensors it owns.
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
