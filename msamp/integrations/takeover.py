"""Replace a torch optimizer by one of this library: choose the recipe, convert its parameter groups, and disable it.

`msamp.initialize` does this for a whole model, and `msamp.integrations.fsdp` for a model sharded by `fully_shard`. Your own integration can
do the same:

    recipe = chosen_recipe("O2", None, None)
    check_optimizer(adamw, recipe)
    low = LoopOptimizer(parameter_groups(adamw, model, recipe), recipe, ScalingState(model))
    retire(adamw, low)

The second half is for a second `msamp.initialize` on a model, for another stage of training. Weights at O3 and COAT are E4M3, and only the
optimizer's masters have more bits: a second optimizer that started from the weights would change each by up to 6 %. So it takes the masters
of the former optimizer, whose step then raises. FP8 layers keep the format and the casts of their weights; a recipe with others is refused.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from msamp.integrations.loop_optimizer import LoopOptimizer, optimizers_of, parameter_formats
from msamp.integrations.saving import masters_of
from msamp.nn.linear import Loading
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics import recipe as recipes
from msamp.numerics.formats import ALL as ALL_FORMATS
from msamp.numerics.formats import by_name
from msamp.numerics.recipe import FP32_STATES, GEMMS, KINDS, Recipe, StateFormats
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim import updates
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.shard import Shard
from msamp.optim.states import parameter_kind
from msamp.optim.updates import format_names

ACCEPTED = {"Adam": None, "AdamW": None, "SGD": "sgd-momentum", "Muon": "muon"}  # class in torch.optim -> update; None: the recipe's
_GRAD_FORMATS = tuple(fmt.name for fmt in ALL_FORMATS)
_RETIRED = "_msamp_retired"  # attribute of an optimizer that was replaced
_TORCH_ONLY = {*updates.UNSUPPORTED, "params", "foreach", "fused", "decoupled_weight_decay"}


def chosen_recipe(
    recipe: str | Recipe | None,
    opt_level: str | None,
    fp8_recipe: str | None,
    master_rounding: str | None = None,
    moment_rounding: str | None = None,
    grad_format: str | None = None,
) -> Recipe:
    """Return the recipe that the arguments select, O2 by default. Arguments as in `msamp.initialize`.

    Raises:
        ValueError: for an unknown name, two recipes, one that scales the loss, and a cast or a gradient format for a recipe without FP8
            GEMMs.
    """
    named = [recipes.by_name(given) for given in (recipe, opt_level) if given is not None]
    first, *others = named or [recipes.O2]
    if any(other != first for other in others):
        raise ValueError(f"recipe is {first.name!r} and opt_level is {opt_level!r}; both select the recipe, so pass only one of them")
    if first.scales_loss:
        raise ValueError(f"recipe {first.name!r} scales the loss, which an optimizer cannot do; use msamp.amp.initialize and scale_loss")
    first = first.with_rounding(master=master_rounding, moments=moment_rounding)
    if grad_format is not None:
        if grad_format not in _GRAD_FORMATS:
            raise ValueError(f"grad_format is {grad_format!r}; it must be one of {', '.join(_GRAD_FORMATS)}")
        if not first.fp8:
            raise ValueError(
                f"grad_format is {grad_format!r}, and recipe {first.name!r} has no FP8 layer; drop it, or take a recipe with FP8 layers"
            )
        first = first.with_states(grad=by_name(grad_format))
    if fp8_recipe is None:
        return first
    if fp8_recipe not in GEMMS:
        raise ValueError(f"fp8_recipe is {fp8_recipe!r}; it must be one of {', '.join(GEMMS)}")
    if not first.fp8:
        raise ValueError(
            f"fp8_recipe is {fp8_recipe!r}, but recipe {first.name!r} has no FP8 GEMM; drop it, or use a recipe with FP8 GEMMs"
        )
    return first.with_gemm(GEMMS[fp8_recipe])


def update_name(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str | None:
    """Return the update for a parameter group of an accepted optimizer, or for its defaults; None: the recipe's own, AdamW."""
    name = ACCEPTED[type(optimizer).__name__]
    return "sgd" if name == "sgd-momentum" and not group["momentum"] else name


def check_optimizer(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Raise a ValueError if the optimizer's class is not in `ACCEPTED`, it was already replaced, it has hooks, or the recipe's updates do
    not support its options or parameters."""
    kind = type(optimizer).__name__
    if kind not in ACCEPTED or vars(torch.optim).get(kind) is not type(optimizer):  # torch.optim.Muon exists since torch 2.9
        raise ValueError(
            f"optimizer is a {type(optimizer).__module__}.{kind}; accepted are torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, "
            "torch.optim.Muon, a list of them, and None (which makes a LowPrecisionOptimizer with AdamW's defaults)"
        )
    if getattr(optimizer, _RETIRED, False):
        raise ValueError("this optimizer was replaced by an earlier msamp.initialize; build a new one from model.parameters()")
    if any(hooks for name, hooks in vars(optimizer).items() if name.startswith("_optimizer_") and name.endswith("_hooks")):
        raise ValueError("the optimizer has hooks, which would no longer run; register them on the optimizer that is returned")
    for group in optimizer.param_groups:
        updates.check_options(group)
        name = update_name(optimizer, group)
        if name is not None and recipe.states.update != FP32_STATES.update:
            raise ValueError(
                f"recipe {recipe.name!r} requires AdamW with BF16 arithmetic, but the optimizer is a {kind}; pass torch.optim.AdamW, or "
                "use another recipe"
            )
        for states in map(recipe.formats_of, KINDS):
            update = updates.by_name(name or states.update)
            update.check_group(format_names(states), is_decoupled(optimizer, group))
            update.check_numbers(group)
        for p in group["params"] if name is not None else ():
            update.check_parameter(p)


def is_decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a parameter group of an accepted optimizer has decoupled weight decay."""
    return bool(group.get("decoupled_weight_decay", type(optimizer).__name__ in ("AdamW", "Muon")))


def parameter_groups(optimizer: torch.optim.Optimizer, model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Return the parameter groups of `optimizer` over the parameters of the converted model, with their names and formats."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        params = list(group["params"])
        common = {k: v for k, v in group.items() if k not in _TORCH_ONLY}
        common["formats"] = [parameter_formats(p, recipe, update_name(optimizer, group)) for p in params]
        common.setdefault("param_names", [names.get(id(p), f"parameter {i} of group {number}") for i, p in enumerate(params)])
        groups.append({"params": params, "decoupled": is_decoupled(optimizer, group), **common})
    return groups


def divide_parameters(optimizer: torch.optim.Optimizer, divided: Mapping[torch.Tensor, Sequence[torch.Tensor]]) -> None:
    """Replace each parameter that the conversion divided (the weight of experts) in the optimizer's groups by its parts, with the names
    `<name>.0`, `<name>.1`, ..., and its states by their slices along dim 0."""
    for group in optimizer.param_groups:
        names = group.get("param_names")
        if names is not None:
            pairs = zip(names, group["params"], strict=True)
            group["param_names"] = [
                own for name, p in pairs for own in ([f"{name}.{e}" for e in range(len(divided[p]))] if p in divided else [name])
            ]
        group["params"] = [own for p in group["params"] for own in divided.get(p, [p])]
    for whole, parts in divided.items():
        state, shape = optimizer.state.pop(whole, {}), (len(parts), *parts[0].shape)
        for e, part in enumerate(parts if state else ()):
            optimizer.state[part] = {
                key: x if not isinstance(x, torch.Tensor) else x[e].clone() if x.shape == shape else x.clone() for key, x in state.items()
            }


def check_groups(optimizers: Sequence[torch.optim.Optimizer], linear: Collection[torch.Tensor], recipe: Recipe) -> None:
    """Raise the ValueError that a LoopOptimizer would raise for the groups of accepted optimizers, by building a temporary one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            name = update_name(optimizer, group)
            formats = [recipe.formats_of("linear" if p in linear else parameter_kind(p)) for p in group["params"]]
            trial = {k: v for k, v in group.items() if k not in _TORCH_ONLY}
            trial["formats"] = [states if name is None else states.varied(update=name) for states in formats]
            trial["params"], trial["decoupled"] = list(group["params"]), is_decoupled(optimizer, group)
            LowPrecisionOptimizer([trial])


def defaults_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings with which a LoopOptimizer gives later groups the options of `optimizer`; none for Adam."""
    usual = optimizer.defaults
    name = update_name(optimizer, usual)
    if name is None:
        return {}
    own = {option: usual[option] for option in ("lr", "weight_decay", *updates.by_name(name).options())}
    return {**own, "decoupled": is_decoupled(optimizer, usual), "formats": StateFormats(update=name)}


def joined_state(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Combine the states of several optimizers, as `state_dict` returns them, into that of one optimizer with all their groups."""
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        start, saved = sum(len(group["params"]) for group in groups), optimizer.state_dict()
        state |= {start + index: own for index, own in saved["state"].items()}
        groups += [{**group, "params": [start + index for index in group["params"]]} for group in saved["param_groups"]]
    return {"state": state, "param_groups": groups}


def retire(optimizer: torch.optim.Optimizer, low: LoopOptimizer, groups: slice | None = None) -> None:
    """Disable the given optimizer: its step raises. It shares the groups of `low`, or some of them, so that a scheduler bound to it, before
    or after, sets the learning rates of `low`."""
    optimizer.param_groups = low.param_groups if groups is None else low.param_groups[groups]
    reason = "this optimizer was replaced by msamp.initialize and has no states; step the one that it returned: "
    optimizer.register_step_pre_hook(functools.partial(_refuse_step, reason + "model, optimizer = msamp.initialize(model, optimizer)"))
    setattr(optimizer, _RETIRED, True)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler bound to it would warn that it never steps


def former_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], recipe: Recipe) -> list[LoopOptimizer]:
    """Return the optimizers of earlier `msamp.initialize` calls on a model, which the given optimizers replace, without changing them.

    Raises:
        ValueError: if a layer is in FP8 with another recipe, or a former optimizer shares no parameter with the given ones.
    """
    former = optimizers_of(model.parameters())
    names = " and ".join(sorted({repr(each.recipe.name) for each in former})) or "an earlier conversion"
    held = {id(p) for each in former for group in each.param_groups for p in group["params"]}
    for name, module in model.named_modules():
        weights = [p for p in module.parameters(recurse=False) if isinstance(p, ScalingTensor)]
        scaling = getattr(module, "scaling", None)
        if not isinstance(module, Loading) or not weights or not isinstance(scaling, LinearScaling):
            continue
        if not weights[0].requires_grad and id(weights[0]) not in held:
            continue  # a frozen base that was converted separately: no optimizer of this recipe updates its weights
        if weights[0].format != recipe.weight or scaling.gemm != recipe.gemm:
            raise ValueError(
                f"{name or 'the model'} is already in FP8 with {names} (weight {weights[0].format}, {scaling.described}), but recipe "
                f"{recipe.name!r} stores or casts it differently; use the recipe of the first msamp.initialize, or load "
                "msamp.plain_state_dict(model, optimizer) into a new model and initialize that one"
            )
    given = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for each in former:
        if not any(id(p) in given for group in each.param_groups for p in group["params"]):
            raise ValueError(
                "the model already has an optimizer of msamp.initialize for other parameters, and both would roll the scales of its "
                "casts; pass all optimizers in one list, msamp.initialize(model, [first, second]), or delete the first one"
            )
    return former


def take_masters(former: LoopOptimizer) -> dict[torch.Tensor, torch.Tensor]:
    """Return the FP32 values of a former optimizer's separate masters. Collective under ZeRO."""
    masters = masters_of(former, everywhere=True) or {}
    return {p: fp32_values(masters[id(p)]).to(p.device) for group in former.param_groups for p in group["params"] if id(p) in masters}


def release(former: LoopOptimizer) -> None:
    """Disable a former optimizer: its step raises, and it no longer averages gradients or has states."""
    reason = "a second msamp.initialize on the model replaced this optimizer and took its masters; step the optimizer that it returned"
    former.register_step_pre_hook(functools.partial(_refuse_step, reason))
    former.casts.detach()
    former.grad_sync, former.shard = None, Shard()
    former.state.clear()
    former.live = False


def _refuse_step(reason: str, *_: Any) -> None:
    raise ValueError(reason)
