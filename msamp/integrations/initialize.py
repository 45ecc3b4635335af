"""`msamp.initialize`: FP8 in one's own PyTorch loop with one line."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from msamp.comm.grad_sync import GradSync
from msamp.kernels.scaled_mm import warn_if_emulated
from msamp.nn.convert import convert
from msamp.nn.filters import DEFAULT, Filter
from msamp.nn.linear import FP8Linear, check_finite
from msamp.nn.scaling_state import ScalingState
from msamp.numerics import recipe as recipes
from msamp.numerics.formats import Format
from msamp.numerics.recipe import FP32_STATES, Recipe
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.adamw import FP8AdamW
from msamp.optim.clip import check_max_norm
from msamp.parallel.data_parallel import grad_sync
from msamp.parallel.greedy_zero import ZeRO

LEVELS = {recipe.name: recipe for recipe in (recipes.O1, recipes.O2, recipes.O3)}
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "capturable")
_TORCH_ONLY = {*_UNSUPPORTED, "params", "foreach", "fused", "decoupled_weight_decay"}


def _recipe(opt_level: str) -> Recipe:
    if opt_level not in LEVELS:
        raise ValueError(f"opt_level is {opt_level!r}; it must be one of {', '.join(LEVELS)} (without msamp the loop is O0)")
    return LEVELS[opt_level]


def _ranks(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The data-parallel ranks, by default all of them; None where that is one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group given; pass the group of its own data-parallel ranks")
    return (group or dist.group.WORLD) if dist.get_world_size(group) > 1 else None


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(
            f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}; accepted are torch.optim.AdamW, torch.optim.Adam "
            "and None (which makes an FP8AdamW with AdamW's defaults)"
        )
    if optimizer.state:
        raise ValueError("the optimizer has stepped already; call msamp.initialize before the first step, or load its state afterwards")
    for group in optimizer.param_groups:
        for option in _UNSUPPORTED:
            if group.get(option):
                raise ValueError(f"optimizer option {option}=True is not available in low precision; build the optimizer without it")


def _check_model(model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("DistributedDataParallel cannot hold FP8 weights; give model.module: msamp averages the gradients itself")
    for name, p in model.named_parameters():
        if p.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{name} is {p.dtype}; use a model in torch.float32 or torch.bfloat16 (model.float() or model.bfloat16())")
    known = {id(p) for p in model.parameters()}
    held = [id(p) in known for g in optimizer.param_groups for p in g["params"]]
    if not any(held):
        raise ValueError("the optimizer holds no parameter of this model; build it from model.parameters()")
    if group is not None and not all(held):
        raise ValueError(
            f"{held.count(False)} of the optimizer's {len(held)} parameters are not in this model, so that nothing would average "
            "their gradients over the ranks; build one optimizer a model"
        )


def _start_equal(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Every rank takes the weights and buffers of the group's first, as DistributedDataParallel does."""
    tensors = {name: x.detach() for name, x in [*model.named_parameters(), *model.named_buffers()]}
    wanting = {name for name, p in model.named_parameters() if p.requires_grad}
    mine = [f"{name} {tuple(x.shape)} {x.dtype}{'' if name in wanting else ', no gradient'}" for name, x in tensors.items()]
    lists: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(lists, mine, group=group)
    for rank, theirs in enumerate(lists):
        if theirs != lists[0]:
            differing = ", ".join(sorted(set(theirs) ^ set(lists[0]))[:4]) or "the order of their parameters"
            raise ValueError(f"ranks 0 and {rank} of the group have different models ({differing}); build the same one on every rank")
    for x in tensors.values():
        dist.broadcast(x, group=group, group_src=0)


def _groups(optimizer: torch.optim.Optimizer, renamed: Mapping[int, nn.Parameter], recipe: Recipe) -> list[dict[str, Any]]:
    """The parameter groups of `optimizer`, each split into FP8 linear weights and the rest (FP32 states)."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        params = [renamed.get(id(p), p) for p in group["params"]]
        common = {k: v for k, v in group.items() if k not in _TORCH_ONLY} | {"lr": float(group["lr"])}
        common["decoupled"] = bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))
        linear = [p for p in params if isinstance(p, ScalingTensor)]
        rest = [p for p in params if not isinstance(p, ScalingTensor)]
        groups += [{"params": linear, "formats": recipe.states, **common}] if linear else []
        groups += [{"params": rest, "formats": FP32_STATES, **common}] if rest else []
    return groups


class _Step:
    """Optimizer hooks: `optimizer.step()` begins with the average of the gradients, and its end is the step's end for the scales."""

    def __init__(self, state: ScalingState, sync: GradSync | None) -> None:
        self.state, self.sync = state, sync

    def before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sync, closure = self.sync, kwargs.get("closure", args[1] if len(args) > 1 else None)
        if sync is None:
            return args, kwargs
        if closure is None:
            sync.finish()
            return args, kwargs

        def averaged() -> Any:
            loss = closure()
            sync.finish()
            return loss

        return (optimizer, averaged), {}

    def after(self, *_: Any) -> None:
        self.state.roll(None if self.sync is None else self.sync.peers.group)
        if self.sync is not None:
            self.sync.clear()


def _low_precision_optimizer(
    model: nn.Module,
    groups: list[dict[str, Any]],
    recipe: Recipe,
    group: dist.ProcessGroup | None,
    zero: bool,
    clip_grad: float | None,
) -> FP8AdamW:
    """An optimizer whose step takes the gradients' average over the ranks and rolls the model's scales."""
    sync = None
    if group is not None:
        formats: dict[torch.Tensor, Format] = {
            p: recipe.states.grad if isinstance(p, ScalingTensor) else FP32_STATES.grad for p in model.parameters()
        }
        sync = grad_sync(model, formats, group, shard=zero)
    low = FP8AdamW(groups, clip_grad=clip_grad, shard=ZeRO(sync) if sync is not None and zero else None)
    low.grad_sync = sync  # type: ignore[attr-defined]
    low.no_sync = contextlib.nullcontext if sync is None else sync.no_sync  # type: ignore[attr-defined]
    hooks = _Step(ScalingState(model), sync)
    low.register_step_pre_hook(hooks.before)
    low.register_step_post_hook(hooks.after)
    return low


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O2",
    *,
    accept: Filter = DEFAULT,
    group: dist.ProcessGroup | None = None,
    zero: bool | None = None,
    clip_grad: float | None = None,
) -> tuple[nn.Module, FP8AdamW]:
    """Turn a model and its Adam into their FP8 counterparts (FP8-LM section 2; levels of section 3).

    Linear layers that `accept` admits compute in FP8 and store their weight as FP16 scaled (O1, O2) or E4M3 with an FP16
    master (O3). Their gradient is E4M3, quantised once, after all micro-batches of the step have accumulated. Moments are
    FP32 (O1) or E4M3 and FP16 (O2, O3). Everything else keeps its dtype, FP32 gradients and FP32 states.

    On one process `p.grad` is what backward leaves and `optimizer.step()` quantises. On several, in place of
    DistributedDataParallel, which cannot hold FP8 weights: all start from the weights and buffers of the group's first
    rank, gradients leave during backward, and `step` takes their average over the ranks. Then `p.grad` is always None
    (the average is `p.main_grad` from `optimizer.grad_sync.finish()`, which `step` calls, to the end of `step`; with ZeRO
    only an owner has it): clip with `clip_grad`, torch's clip_grad_norm_ would find nothing. All micro-batches of a step
    but the last run their backward under `optimizer.no_sync()`.

    Build learning-rate schedulers from the returned optimizer: a group of the given one may have become two.

    Args:
        model: any module tree, changed in place.
        optimizer: torch.optim.AdamW or Adam over parameters of `model`, before its first step; None makes an FP8AdamW
            over all parameters with AdamW's defaults.
        opt_level: "O1", "O2" or "O3".
        accept: which linear layers, see `msamp.nn.filters`.
        group: the data-parallel ranks; None is all of torch.distributed, where that is initialised.
        zero: spread the optimizer over the ranks, see `ZeRO` (the optimizer's `state_dict` is collective); None does so at O3.
            Without effect on one process.
        clip_grad: clip the global gradient norm to this in `step`, on any number of processes.

    Returns:
        The model, the same object, and the optimizer. Beside what it always has, it carries `grad_sync`, its GradSync (bytes
        sent, statistics; None on one process), and `no_sync`, that one's context (without effect on one process).

    Raises:
        ValueError: for another level or optimizer (listing those accepted), an optimizer option without a low-precision
            form, a weight that is not finite, or ranks whose models differ. No layer has been converted then.
    """
    recipe = _recipe(opt_level)
    group = _ranks(group)
    if clip_grad is not None:
        check_max_norm(clip_grad)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    _check_optimizer(optimizer)
    _check_model(model, optimizer, group)
    if group is not None:
        _start_equal(model, group)
    for name, p in model.named_parameters():
        check_finite(p, name)
    originals = {name: m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for device in {p.device for p in model.parameters()}:
        warn_if_emulated(device)
    model = convert(model, recipe, accept)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, FP8Linear)}
    renamed = {id(originals[name]): layer.weight for name, layer in layers.items() if name in originals}
    zero = recipe.shards_optimizer if zero is None else zero
    low = _low_precision_optimizer(model, _groups(optimizer, renamed, recipe), recipe, group, zero, clip_grad)
    owned = {id(p) for g in low.param_groups for p in g["params"]}
    if recipe.weight != recipe.states.master:  # the master starts from the weight as it was, not from its FP8 rounding
        for name, layer in layers.items():
            if name in originals and id(layer.weight) in owned:
                low.init_master(layer.weight, originals[name].detach())
    return model, low
