"""FSDP2 with FP8 weights, in a loop of one's own:

    from torch.distributed.fsdp import fully_shard
    from msamp.integrations import fsdp

    model = fsdp.prepare(model, recipe="O2")              # linear layers become FP8, their weights FP16 with a scale
    for block in model.blocks:
        fully_shard(block, mesh=mesh)                     # torch's own; weights are gathered in FP8
    fully_shard(model, mesh=mesh)
    optimizer = fsdp.optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe="O2")

No other order is possible: `fully_shard` replaces every parameter by its rows, so layers are converted before it and the
optimizer is built after it. FSDP averages gradients in the dtype of the layer's weight, or in `MixedPrecisionPolicy.reduce_dtype`; the
optimizer's step quantises the average to the recipe's format.

Checkpoints are those of one process: `model_state` and `optimizer.state_dict()` gather whole tensors to the first rank, `load_model` and
`optimizer.load_state_dict` give every rank its rows, over any number of ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from msamp.integrations.loop_optimizer import LoopOptimizer
from msamp.integrations.takeover import check_optimizer, chosen_recipe, parameter_groups, retire
from msamp.kernels.scaled_mm import warn_if_emulated
from msamp.nn.convert import convert
from msamp.nn.filters import DEFAULT, Filter
from msamp.nn.linear import FP8Linear
from msamp.nn.parameter_swap import swap_contents_
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.recipe import Recipe
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.clip import check_max_norm, clip_coefficient
from msamp.optim.states import copy_of_rows, is_scaled, local, payload, weight_format
from msamp.parallel.fsdp import FSDP, ShardedWeight, check_cut, rows_of, sharded_casts


def _recipe(recipe: str | Recipe | None, opt_level: str | None, fp8_recipe: str | None, *roundings: str | None) -> Recipe:
    chosen = chosen_recipe(recipe, opt_level, fp8_recipe, *roundings)
    if chosen.gemm is None:
        raise ValueError(
            f"recipe {chosen.name!r} has no FP8 GEMM; use torch's fully_shard and torch.optim.AdamW without msamp, or O1 or O2"
        )
    if chosen.weight != chosen.states.master:
        raise ValueError(
            f"recipe {chosen.name!r} stores weights in {chosen.weight} beside masters in {chosen.states.master}, which FSDP2 does not "
            "shard here; take O1 or O2, or msamp.initialize(..., zero=True) without fully_shard"
        )
    if chosen.gemm.weight.granularity != TENSORWISE:
        raise ValueError(
            f"the weight's cast is {chosen.gemm.weight}, and FSDP2 gathers FP8 weights with one scale a tensor; take fp8_recipe "
            "'delayed' or 'tensorwise', or msamp.initialize(..., zero=True) without fully_shard"
        )
    return chosen


def prepare(
    model: nn.Module,
    recipe: str | Recipe | None = None,
    *,
    opt_level: str | None = None,
    fp8_recipe: str | None = None,
    accept: Filter = DEFAULT,
) -> nn.Module:
    """Convert the linear layers of a model, in place, into FP8 ones that torch's `fully_shard` can cut and gathers in FP8.

    Args:
        model: on its device, with the same values on every rank, before fully_shard.
        recipe, opt_level, fp8_recipe, accept: as of `msamp.initialize`; the weights are their own masters (O1, O2) and cast with one scale.

    Returns:
        The model, the same object.

    Raises:
        ValueError: for another recipe, for a model that is sharded already, and for what `msamp.convert` refuses. No layer has been
            converted then.
    """
    chosen = _recipe(recipe, opt_level, fp8_recipe)
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise ValueError(f"{name} is a DTensor already; call msamp.integrations.fsdp.prepare(model) before fully_shard")
        if isinstance(p, ScalingTensor):
            raise ValueError(
                f"{name} is a ScalingTensor already; give fsdp.prepare the model as it was before msamp.convert or msamp.initialize"
            )
        if p.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values; materialise the model before fsdp.prepare quantises it")
    convert(model, chosen, accept)
    for device in {p.device for p in model.parameters()}:
        warn_if_emulated(device)
    for layer in model.modules():
        if isinstance(layer, FP8Linear):
            last = layer.weight
            assert isinstance(last, ScalingTensor)
            swap_contents_(last, nn.Parameter(ShardedWeight(last.payload, last.scale_inv, last.dtype), last.requires_grad))
    return model


class ShardedOptimizer(LoopOptimizer):
    """What `optimizer` returns: a `LoopOptimizer` with FSDP's shard."""

    shard: FSDP

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.shard.peers.group

    def update(self) -> None:
        super().update()
        self.shard.measure()

    def clip(self, params: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip this rank's rows of some parameters' gradients, in place; the norm is that of the gradients as a step quantises them."""
        chosen = set(params)
        ready = [holding for holding in self.shard.ready(self._whole()) if holding.param in chosen]
        norm = self.norm_of(ready)
        coefficient = clip_coefficient(norm, max_norm)
        for p in chosen:
            if p.grad is not None:
                local(p.grad).mul_(coefficient)
        return norm

    def __getstate__(self) -> dict[str, Any]:
        raise ValueError("an optimizer of sharded parameters cannot be copied or pickled; save state_dict() and load it into another one")


def optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    recipe: str | Recipe | None = None,
    *,
    opt_level: str | None = None,
    fp8_recipe: str | None = None,
    clip_grad: float | None = None,
    master_rounding: str | None = None,
    moment_rounding: str | None = None,
    seed: int = 0,
) -> ShardedOptimizer:
    """The optimizer of a recipe over a model that `prepare` and then torch's `fully_shard` have treated. Collective.

    Each rank keeps master and moments of its rows; scales are those of whole tensors, and so is the norm. `step` rolls the scales of the
    casts. The given optimizer's `step` raises from then on, and a scheduler bound to it sets the rates of the returned one.

    Args:
        model: sharded, along dim 0 over a mesh of one dimension.
        optimizer: torch.optim.AdamW or Adam over parameters of `model`, built after `fully_shard`; None is AdamW with its defaults.
        recipe, opt_level, fp8_recipe: those given to `prepare`.
        clip_grad: clip the global gradient norm to this in `step`.
        master_rounding, moment_rounding, seed: as of `msamp.initialize`; the bits do not depend on the number of ranks.

    Raises:
        ValueError: for another recipe than that of `prepare`, a parameter that is not sharded or sharded in another way, an optimizer from
            before `fully_shard`, and ranks with models that began with different weights.
    """
    chosen = _recipe(recipe, opt_level, fp8_recipe, master_rounding, moment_rounding)
    if clip_grad is not None:
        check_max_norm(clip_grad)
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in names.items():
        check_cut(name, p)
    casts = sharded_casts(model)
    if not casts or not isinstance(model, FSDPModule):
        raise ValueError("the model holds no sharded FP8 weight; call msamp.integrations.fsdp.prepare(model), then fully_shard(model)")
    for weight, cast in casts.items():
        if cast != chosen.gemm.weight or weight_format(weight) != chosen.weight:  # type: ignore[union-attr]
            raise ValueError(
                f"a weight is stored in {weight_format(weight)} and cast as {cast}, and recipe {chosen.name!r} takes {chosen.weight} and "
                f"{chosen.gemm.weight}; give the recipe that fsdp.prepare was given"  # type: ignore[union-attr]
            )
    given = torch.optim.AdamW(model.parameters()) if optimizer is None else optimizer
    check_optimizer(given, chosen)
    if given.state:
        raise ValueError("the optimizer has stepped already; give one that has not, and load whole states afterwards")
    known = {id(p) for p in model.parameters()}
    if not all(id(p) in known for group in given.param_groups for p in group["params"]):
        raise ValueError("the optimizer holds parameters that are not this model's now; build it from model.parameters() after fully_shard")
    shard = FSDP(casts, next(iter(names.values())).device_mesh.get_group())  # type: ignore[attr-defined]
    _check_scales(shard, model)
    low = ShardedOptimizer(parameter_groups(given, model, chosen), chosen, ScalingState(model), clip_grad=clip_grad, shard=shard, seed=seed)
    retire(given, low)
    return low


def _check_scales(shard: FSDP, model: nn.Module) -> None:
    """ValueError where ranks hold different scales of one weight: they were quantised from different models."""
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    scales = torch.stack([local(p).scale_inv for p in shard.casts])
    most = shard.peers.all_reduce(torch.stack([scales, -scales]), dist.ReduceOp.MAX, "the scales of weights", None)
    differing = [names[p] for p, differs in zip(shard.casts, (most[0] != -most[1]).tolist(), strict=True) if differs]
    if differing:
        raise ValueError(
            f"ranks have different models ({', '.join(differing[:4])}); build the same one on every rank, by one seed or one checkpoint, "
            "before fsdp.prepare"
        )


@torch.no_grad()
def model_state(model: nn.Module) -> dict[str, Any]:
    """`state_dict()` of the model as one process would have it, gathered tensor by tensor: on the CPU of the first rank, empty on others.

    Collective.
    """
    found: dict[str, Any] = {}
    for name, x in model.state_dict().items():
        whole = x
        if isinstance(x, DTensor):
            check_cut(name, x)
            shard = FSDP({}, x.device_mesh.get_group())
            whole = shard.whole(local(x), x)
        if dist.get_rank() == 0:
            found[name] = whole.to("cpu", copy=True)
    return found


@torch.no_grad()
def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give every rank its rows of a model's `state_dict()`, as `model_state` or an unsharded FP8 model of the same recipe has saved it.

    Args:
        model: sharded.
        state: the whole one, on every rank, on any device.

    Raises:
        ValueError: for missing or unknown names, another shape, and a plain tensor for an FP8 weight; nothing has changed then.
    """
    mine = model.state_dict()
    if mine.keys() != state.keys():
        raise ValueError(f"the state lacks or adds {', '.join(sorted(mine.keys() ^ state.keys())[:4])}; load what this model has saved")
    for name, x in mine.items():
        given, own = (f"{payload(t).dtype}{' with a scale' if is_scaled(t) else ''} {tuple(t.shape)}" for t in (state[name], x))
        if x.shape != state[name].shape or (is_scaled(x) and given != own):
            raise ValueError(
                f"{name} is {own}, and {given} was given; load "
                "what a model of this recipe has saved, or load plain weights before fsdp.prepare"
            )
    cut = {}
    for name, x in mine.items():
        if isinstance(x, DTensor):
            check_cut(name, x)
            rows = copy_of_rows(state[name], rows_of(x, x.device_mesh.get_local_rank()))
            local(x).copy_(rows.to(local(x).device))
        else:
            cut[name] = state[name]
    model.load_state_dict(cut, strict=False)
