"""A second `msamp.initialize` on a model, for a second stage of training with a new optimizer and the masters of the first.

Weights at O3 and COAT are E4M3, and only the optimizer's masters have more bits. A second optimizer that started from the weights would
change each by up to 6 %. So it takes the masters of the former optimizer, whose step then raises. FP8 layers keep the format and the casts
of their weights; a recipe with others is rejected.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from msamp.integrations.loop_optimizer import LoopOptimizer, optimizers_of
from msamp.nn.linear import Loading
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.recipe import Recipe
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.shard import Whole
from msamp.optim.updates import MASTER


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
    former.reload_model_params()  # weights may have been loaded since the last step
    params = [p for group in former.param_groups for p in group["params"]]
    states: list[Any] = [former.state.get(p, {}) for p in params]
    if former.shard.ranks > 1:
        gathered = [former.state_dict()["state"]]
        dist.broadcast_object_list(gathered, group=former.group, group_src=0)
        states = [gathered[0].get(index, {}) for index in range(len(params))]
    return {p: fp32_values(state[MASTER.key]).to(p.device) for p, state in zip(params, states, strict=True) if MASTER.key in state}


def release(former: LoopOptimizer) -> None:
    """Disable a former optimizer: its step raises, and it no longer averages gradients or has states."""
    former.register_step_pre_hook(_refuse_step)
    former.casts.detach()
    former.grad_sync, former.shard = None, Whole()
    former.state.clear()
    former.live = False


def _refuse_step(*_: Any) -> None:
    raise ValueError(
        "a second msamp.initialize on the model replaced this optimizer and took its masters; step the optimizer that it returned"
    )
