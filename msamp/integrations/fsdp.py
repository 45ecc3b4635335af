"""FSDP2 with FP8 weights in your own loop:

    from torch.distributed.fsdp import fully_shard
    from msamp.integrations import fsdp

    model = fsdp.prepare(model, recipe="O2")              # linear layers become FP8, their weights FP16 with a scale
    for block in model.blocks:
        fully_shard(block, mesh=mesh)                     # torch's own; weights are gathered in FP8
    fully_shard(model, mesh=mesh)
    optimizer = fsdp.optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe="O2")

This order is required: `fully_shard` replaces every parameter by its shard, so layers must be converted before it and the optimizer must be
built after it. FSDP averages gradients in the dtype of the layer's weight, or in `MixedPrecisionPolicy.reduce_dtype`; the optimizer's step
quantizes the average to the recipe's format.

At O1 and O2 the weight is its own master, and is cast to FP8 once per step. At O3 and coat the stored weight is already FP8 and is gathered
unchanged. COAT's moments have a maximum and an exponent for each group of 128 elements of a row. `fully_shard` cuts between rows, so no
group is cut, and every rank keeps the maxima and exponents of its rows. Vectors have FP32 moments. `msamp.LayerNorm`, `msamp.RMSNorm` and
`msamp.Activation` save activations in FP8 groups, sharded or not.

Checkpoints are the same as on one process: `model_state` and `optimizer.state_dict()` gather whole tensors to the first rank, `load_model`
and `optimizer.load_state_dict` load each rank's rows, on any number of ranks.
"""

import warnings
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
from msamp.nn.convert import carry_out, plan_conversions, planned_weights
from msamp.nn.decoder_layer import fuse as fuse_layers
from msamp.nn.decoder_layer import unfuse
from msamp.nn.expert_layer import Experts
from msamp.nn.filters import DEFAULT, Filter
from msamp.nn.layer_gains import check_min_gain
from msamp.nn.linear import FP8Linear, check_finite
from msamp.nn.parameter_swap import swap_contents_
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.formats import FP16, FP32
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.recipe import Cast, Recipe
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.clip import check_max_norm, clip_coefficient
from msamp.optim.masters import belongs
from msamp.optim.states import copy_of_rows, is_scaled, local, make_master, payload, weight_format
from msamp.optim.updates import MASTER
from msamp.parallel.fsdp import FSDP, check_cut, rows_of
from msamp.parallel.sharded_weight import ShardedWeight

_MASTERS = (FP16, FP32)  # formats of masters next to weights in FP8
_MASTER = "_whole_master"  # attribute of a layer from `prepare` to `optimizer`


def _recipe(recipe: str | Recipe | None, opt_level: str | None, fp8_recipe: str | None, *roundings: str | None) -> Recipe:
    chosen = chosen_recipe(recipe, opt_level, fp8_recipe, *roundings)
    if chosen.gemm is None:
        raise ValueError(
            f"recipe {chosen.name!r} has no FP8 GEMM; use torch's fully_shard and torch.optim.AdamW without msamp, or O1, O2, O3 or coat"
        )
    if chosen.exchange != Recipe.exchange:
        raise ValueError(
            f"recipe {chosen.name!r} sums gradients by the exchange {chosen.exchange!r}, and fully_shard sums them itself; use "
            "msamp.initialize, or the recipe without as_published"
        )
    if chosen.weight != chosen.states.master and not (chosen.states.master in _MASTERS and chosen.weight == chosen.gemm.weight.format):
        raise ValueError(
            f"recipe {chosen.name!r} stores weights in {chosen.weight} and masters in {chosen.states.master}; FSDP2 supports weights in "
            f"the master's format, or in {chosen.gemm.weight.format}, which the GEMMs read, with masters in "
            f"{' or '.join(map(str, _MASTERS))}: use O1, O2, O3 or coat, or msamp.initialize(..., zero=True) without fully_shard"
        )
    if chosen.gemm.weight.granularity != TENSORWISE:
        raise ValueError(
            f"the weight's cast is {chosen.gemm.weight}, but FSDP2 gathers FP8 weights with one scale per tensor; use fp8_recipe "
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
    fuse: bool = True,
) -> nn.Module:
    """Convert a model's linear layers in place to FP8 layers that torch's `fully_shard` can shard, and whose weights it gathers in FP8.

    Args:
        model: on its device, with the same values on every rank, before fully_shard.
        recipe, opt_level, fp8_recipe, accept, fuse: as in `msamp.initialize`; O1, O2, O3 or coat, with one scale per weight. At O3 and
            coat each layer stores a whole master, in FP16 or FP32, until `optimizer` takes this rank's rows of it.

    Returns:
        The model, the same object.

    Raises:
        ValueError: before any conversion, if the recipe is not supported, the model is already sharded, or `msamp.convert` rejects it.
    """
    chosen = _recipe(recipe, opt_level, fp8_recipe)
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise ValueError(f"{name} is already a DTensor; call msamp.integrations.fsdp.prepare(model) before fully_shard")
        if isinstance(p, ScalingTensor):
            raise ValueError(f"{name} is already a ScalingTensor; pass fsdp.prepare a model without msamp.convert or msamp.initialize")
        if p.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values; materialize the model before fsdp.prepare quantizes it")
    conversions = plan_conversions(model, chosen, accept)
    for planned in conversions.values():
        if issubclass(planned.kind, Experts):
            raise ValueError(
                f"{planned.weights[0].name} belongs to experts, whose FP8 weights fully_shard cannot divide; keep their dtype by accept="
                "msamp.filters.all_of(msamp.filters.DEFAULT, msamp.filters.exclude_names('experts')), or use msamp.initialize(zero=True)"
            )
    for name, p in planned_weights(conversions).items():
        check_finite(p, name)
    separate = chosen.weight != chosen.states.master
    masters: dict[torch.Tensor, torch.Tensor] = {}  # of the weights before their rounding to FP8
    carry_out(model, chosen, conversions, masters if separate else None)
    fuse_layers(model) if fuse else unfuse(model)
    for device in {p.device for p in model.parameters()}:
        warn_if_emulated(device)
    for layer in model.modules():
        if isinstance(layer, FP8Linear):
            last = layer.weight
            assert isinstance(last, ScalingTensor)
            swap_contents_(last, nn.Parameter(ShardedWeight(last.payload, last.scale_inv, last.dtype), last.requires_grad))
            if separate:
                vars(layer)[_MASTER] = make_master(last, chosen.states.master, masters[last])
    return model


class ShardedOptimizer(LoopOptimizer):
    """The result of `optimizer`: a `LoopOptimizer` with FSDP's shard."""

    shard: FSDP

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.shard.peers.group

    def update(self) -> None:
        super().update()
        self.shard.measure()

    @torch.no_grad()
    def take_masters(self, wholes: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Initialize masters with this rank's rows of whole ones, by parameter; collective.

        A weight may have been loaded after `prepare`. If any rank's rows are not what their master casts to, all ranks compare them in the
        next step, and elements that differ take the weight's value.
        """
        places = {p: place for place, p in enumerate(wholes)}
        loaded = torch.zeros(len(places), dtype=torch.int32, device=self._params()[0].device)
        own = [holding for holding in self.holdings() if holding.param in places]
        for holding in own:
            self._init_state(holding, wholes[holding.param])
            loaded[places[holding.param]] = ~belongs(self.state[holding.weight][MASTER.key], holding.weight)
        if places:
            loaded = self.shard.peers.all_reduce(loaded, dist.ReduceOp.MAX, "which weights were loaded", None)
        for holding, changed in zip(own, loaded[[places[holding.param] for holding in own]].tolist(), strict=True):
            if changed:
                del self._cast[holding.weight]

    def replayed(self) -> None:
        super().replayed()
        self.shard.replayed()

    def clip(self, params: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip this rank's rows of some parameters' gradients in place; the norm is computed after the step's quantization."""
        chosen = set(params)
        ready = [holding for holding in self.shard.ready(self._whole()) if holding.param in chosen]
        norm = self.norm_of(ready)
        coefficient = clip_coefficient(norm, max_norm)
        for p in chosen:
            if p.grad is not None:
                local(p.grad).mul_(coefficient)
        return norm

    def __getstate__(self) -> dict[str, Any]:
        raise ValueError("an optimizer of sharded parameters cannot be copied or pickled; load its state_dict() into a new one")


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
    fp8_min_gain: float = 1.0,
    seed: int = 0,
) -> ShardedOptimizer:
    """Return the optimizer of a recipe for a model after `prepare` and torch's `fully_shard`. Collective.

    Each rank stores master and moments of its rows; scales and the norm are computed for whole tensors. `step` rolls the scales of the
    casts. The given optimizer's `step` raises from then on, and a scheduler bound to it sets the learning rates of the returned one.

    Args:
        model: sharded along dim 0 over a mesh of one dimension.
        optimizer: torch.optim.AdamW or Adam over parameters of `model`, built after `fully_shard`; None is AdamW with its defaults.
        recipe, opt_level, fp8_recipe: as passed to `prepare`.
        clip_grad: clip the global gradient norm to this in `step`.
        master_rounding, moment_rounding, fp8_min_gain, seed: as in `msamp.initialize`; the bits do not depend on the number of ranks.

    Raises:
        ValueError: if the recipe differs from `prepare`'s, a parameter is not sharded or is sharded differently, the optimizer was built
            before `fully_shard`, or the ranks' models have different weights.
    """
    chosen = _recipe(recipe, opt_level, fp8_recipe, master_rounding, moment_rounding)
    if clip_grad is not None:
        check_max_norm(clip_grad)
    check_min_gain(fp8_min_gain)
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in names.items():
        check_cut(name, p)
    gathered = [layer for layer in model.modules() if isinstance(layer, FP8Linear) and is_scaled(layer.weight)]
    casts: dict[torch.Tensor, Cast] = {layer.weight: layer.scaling.gemm.weight for layer in gathered}
    if not casts or not isinstance(model, FSDPModule):
        raise ValueError("the model has no sharded FP8 weight; call msamp.integrations.fsdp.prepare(model), then fully_shard(model)")
    for weight, cast in casts.items():
        if cast != chosen.gemm.weight or weight_format(weight) != chosen.weight:  # type: ignore[union-attr]
            raise ValueError(
                f"a weight is stored in {weight_format(weight)} and cast as {cast}, but recipe {chosen.name!r} uses {chosen.weight} and "
                f"{chosen.gemm.weight}; pass the recipe of fsdp.prepare"  # type: ignore[union-attr]
            )
    given = torch.optim.AdamW(model.parameters()) if optimizer is None else optimizer
    check_optimizer(given, chosen)
    if given.state:
        raise ValueError("the optimizer already took a step; pass a new one, and load whole states afterwards")
    known = {id(p) for p in model.parameters()}
    if not all(id(p) in known for group in given.param_groups for p in group["params"]):
        raise ValueError("the optimizer has parameters that are not in this model; build it from model.parameters() after fully_shard")
    shard = FSDP(casts, next(iter(names.values())).device_mesh.get_group())  # type: ignore[attr-defined]
    _check_scales(shard, model)
    layers = [layer for layer in model.modules() if isinstance(layer, FP8Linear) and _MASTER in vars(layer)]
    masters: dict[torch.Tensor, torch.Tensor] = {layer.weight: vars(layer).pop(_MASTER) for layer in layers}
    if chosen.weight != chosen.states.master and not masters:
        warnings.warn(
            f"the masters of recipe {chosen.name!r} start from the weights in {chosen.weight}, since an earlier optimizer took those of "
            "fsdp.prepare; load its state_dict() into this one",
            stacklevel=2,
        )
    low = ShardedOptimizer(parameter_groups(given, model, chosen), chosen, ScalingState(model), clip_grad=clip_grad, shard=shard, seed=seed)
    low.fp8_min_gain = fp8_min_gain
    low.take_masters(masters)
    retire(given, low)
    return low


def _check_scales(shard: FSDP, model: nn.Module) -> None:
    """Raise a ValueError if ranks have different scales of a weight, which means that their models had different weights."""
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    scales = torch.stack([local(p).scale_inv for p in shard.casts])
    most = shard.peers.all_reduce(torch.stack([scales, -scales]), dist.ReduceOp.MAX, "the scales of weights", None)
    differing = [names[p] for p, differs in zip(shard.casts, (most[0] != -most[1]).tolist(), strict=True) if differs]
    if differing:
        raise ValueError(
            f"ranks have different models ({', '.join(differing[:4])}); build the same one on every rank, from one seed or one checkpoint, "
            "before fsdp.prepare"
        )


@torch.no_grad()
def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's `state_dict()` as on one process, gathered tensor by tensor on the CPU of the first rank, empty on others.

    Collective.
    """
    state: dict[str, Any] = {}
    for name, x in model.state_dict().items():
        whole = x
        if isinstance(x, DTensor):
            check_cut(name, x)
            shard = FSDP({}, x.device_mesh.get_group())
            whole = shard.whole(local(x), x)
        if dist.get_rank() == 0:
            state[name] = whole.to("cpu", copy=True)
    return state


@torch.no_grad()
def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load each rank's rows of a model's `state_dict()`, saved by `model_state` or by an unsharded FP8 model with the same recipe.

    Args:
        model: sharded.
        state: the whole state, on every rank, on any device.

    Raises:
        ValueError: for missing or unknown names, another shape, or a plain tensor for an FP8 weight; nothing has changed then.
    """
    own_state = model.state_dict()
    if own_state.keys() != state.keys():
        raise ValueError(f"missing or unknown names: {', '.join(sorted(own_state.keys() ^ state.keys())[:4])}; load a state of this model")
    for name, x in own_state.items():
        given, own = (f"{payload(t).dtype}{' with a scale' if is_scaled(t) else ''} {tuple(t.shape)}" for t in (state[name], x))
        if x.shape != state[name].shape or (is_scaled(x) and given != own):
            raise ValueError(
                f"{name} is {own}, but the state has {given}; load "
                "a state of a model with this recipe, or load plain weights before fsdp.prepare"
            )
    cut = {}
    for name, x in own_state.items():
        if isinstance(x, DTensor):
            check_cut(name, x)
            rows = copy_of_rows(state[name], rows_of(x, x.device_mesh.get_local_rank()))
            local(x).copy_(rows.to(local(x).device))
        else:
            cut[name] = state[name]
    model.load_state_dict(cut, strict=False)
