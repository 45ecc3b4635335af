"""`msamp.initialize`: FP8 in one's own PyTorch loop with one line."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from msamp.kernels.scaled_mm import warn_if_emulated
from msamp.nn.convert import convert
from msamp.nn.filters import DEFAULT, Filter
from msamp.nn.linear import FP8Linear, check_finite
from msamp.nn.scaling_state import ScalingState
from msamp.numerics import recipe as recipes
from msamp.numerics.recipe import FP32_STATES, Recipe
from msamp.optim.adamw import FP8AdamW

LEVELS = {"O1": recipes.O1, "O2": recipes.O2, "O3": recipes.O3}
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "capturable")
_TORCH_ONLY = {*_UNSUPPORTED, "params", "foreach", "fused", "decoupled_weight_decay"}


def _recipe(opt_level: str) -> Recipe:
    if opt_level not in LEVELS:
        raise ValueError(f"opt_level is {opt_level!r}; it must be one of {', '.join(LEVELS)} (without msamp the loop is O0)")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"msamp.initialize runs on one process in this version, and there are {dist.get_world_size()}; "
            "a GPT trains data-parallel at O1 and O2 with python -m megatron.lm.pretrain"
        )
    return LEVELS[opt_level]


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


def _low_precision_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, renamed: dict[int, nn.Parameter], recipe: Recipe
) -> FP8AdamW:
    """FP8AdamW with the groups of `optimizer`, each split into FP8 linear weights and the rest (FP32 states)."""
    weights = {id(m.weight) for m in model.modules() if isinstance(m, FP8Linear)}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        params = [renamed.get(id(p), p) for p in group["params"]]
        common = {k: v for k, v in group.items() if k not in _TORCH_ONLY} | {"lr": float(group["lr"])}
        common["decoupled"] = bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))
        linear = [p for p in params if id(p) in weights]
        rest = [p for p in params if id(p) not in weights]
        groups += [{"params": linear, "formats": recipe.states, **common}] if linear else []
        groups += [{"params": rest, "formats": FP32_STATES, **common}] if rest else []
    return FP8AdamW(groups)


class _RollScales:
    """Optimizer hook: the end of `optimizer.step()` is the end of the step for the model's scales."""

    def __init__(self, state: ScalingState) -> None:
        self.state = state

    def __call__(self, *_: Any) -> None:
        self.state.roll()


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, opt_level: str = "O2", *, accept: Filter = DEFAULT
) -> tuple[nn.Module, FP8AdamW]:
    """Turn a model and its Adam into their FP8 counterparts (FP8-LM section 2; levels of section 3).

    For one process: torch's DistributedDataParallel cannot hold FP8 weights.

    Linear layers that `accept` admits compute in FP8 and store their weight as FP16 scaled (O1, O2) or E4M3 with an FP16
    master (O3). Their gradient is quantised to E4M3 in `optimizer.step()`, once, after all micro-batches of the step have
    accumulated in it. Moments are FP32 (O1) or E4M3 and FP16 (O2, O3). Everything else keeps its dtype and FP32 states.

    Build learning-rate schedulers from the returned optimizer: a group of the given one may have become two.

    Args:
        model: any module tree, changed in place.
        optimizer: torch.optim.AdamW or Adam over parameters of `model`, before its first step; None makes an FP8AdamW
            over all parameters with AdamW's defaults.
        opt_level: "O1", "O2" or "O3".
        accept: which linear layers, see `msamp.nn.filters`.

    Returns:
        The model, the same object, and the optimizer.

    Raises:
        ValueError: for another level or optimizer (listing those accepted), an optimizer option without a low-precision
            form, or a weight that is not finite. Nothing has been changed then.
    """
    recipe = _recipe(opt_level)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    _check_optimizer(optimizer)
    for name, p in model.named_parameters():
        if p.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{name} is {p.dtype}; use a model in torch.float32 or torch.bfloat16 (model.float() or model.bfloat16())")
        check_finite(p, name)
    known = {id(p) for p in model.parameters()}
    if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer holds no parameter of this model; build it from model.parameters()")
    originals = {name: m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for device in {p.device for p in model.parameters()}:
        warn_if_emulated(device)
    model = convert(model, recipe, accept)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, FP8Linear)}
    renamed = {id(originals[name]): layer.weight for name, layer in layers.items() if name in originals}
    low = _low_precision_optimizer(model, optimizer, renamed, recipe)
    owned = {id(p) for group in low.param_groups for p in group["params"]}
    if recipe.weight != recipe.states.master:  # the master starts from the weight as it was, not from its FP8 rounding
        for name, layer in layers.items():
            if name in originals and id(layer.weight) in owned:
                low.init_master(layer.weight, originals[name].detach())
    low.register_step_post_hook(_RollScales(ScalingState(model)))
    return model, low
