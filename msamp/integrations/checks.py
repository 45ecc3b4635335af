"""What `msamp.initialize` checks before it changes anything: the model's values, the optimizers, and that all ranks start alike."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from msamp.fp16.opt_level import check_first
from msamp.integrations.loop_optimizer import LoopOptimizer
from msamp.integrations.takeover import check_groups, check_optimizer, former_optimizers
from msamp.kernels.scaled_mm import warn_if_emulated
from msamp.nn.convert import Conversion, plan_conversions, planned_weights
from msamp.nn.expert_layer import Experts
from msamp.nn.filters import Filter
from msamp.nn.linear import check_finite, check_plain
from msamp.numerics.recipe import Recipe
from msamp.numerics.tensor import ScalingTensor

_UNWRAPPED = "pass model.module: msamp averages the gradients itself"
_UNCUT = "pass the unsharded model: msamp averages the gradients itself, and shards the optimizer over the ranks with zero=True"
_WRAPPERS = {  # modules that wrap or shard other modules' weights, and what to do instead
    "DistributedDataParallel": _UNWRAPPED,
    "DataParallel": "pass model.module, and start one process per GPU with torchrun",
    "FullyShardedDataParallel": _UNCUT,
    "FSDPModule": _UNCUT,
}
_CASTS = {torch.float32: "model.float()", torch.bfloat16: "model.bfloat16()"}


class NoDistributedDataParallel:
    """Raises when DistributedDataParallel reads a model's list of ignored parameters: the model must not be wrapped."""

    def __iter__(self) -> Iterator[str]:
        raise ValueError(
            "DistributedDataParallel does not support a model of msamp.initialize, whose optimizer averages the gradients itself; use the "
            "model without a wrapper, with optimizer.no_sync(); with accelerate use msamp.integrations.accelerate.Accelerator, and instead "
            "of transformers' Trainer msamp.integrations.transformers.Trainer"
        )


def data_parallel_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the data-parallel ranks, by default all of them; None for one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the given group; pass the group of its own data-parallel ranks")
    return (group or dist.group.WORLD) if dist.get_world_size(group) > 1 else None


def checked(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    recipe: Recipe,
    accept: Filter,
    group: dist.ProcessGroup | None,
) -> tuple[list[torch.optim.Optimizer], dict[nn.Module, Conversion], list[LoopOptimizer]]:
    """Run all checks and make the ranks' weights equal. Return the given optimizers, the planned conversions, and the optimizers of earlier
    calls that are replaced. If one rank raises, all do."""
    refusal: ValueError | None = None
    optimizers: list[torch.optim.Optimizer] = []
    conversions: dict[nn.Module, Conversion] = {}
    former: list[LoopOptimizer] = []
    try:
        _check_values(model)
        optimizer = torch.optim.AdamW(model.parameters()) if optimizer is None else optimizer
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        if not optimizers:
            raise ValueError("optimizer is an empty list; pass at least one, or None")
        for each in optimizers:
            check_optimizer(each, recipe)
        _check_model(model, optimizers, recipe, group)
        former = former_optimizers(model, optimizers, recipe)
        conversions = plan_conversions(model, recipe, accept)
        check_groups(optimizers, set(planned_weights(conversions).values()), recipe)
    except ValueError as error:
        if group is None:
            raise
        refusal = error
    if group is not None:
        _start_equal(model, [recipe.name, *(f"{name} converted" for name in planned_weights(conversions))], refusal, group)
    for name, p in model.named_parameters():
        check_finite(p, name)
    if recipe.fp8:
        for device in {p.device for p in model.parameters()}:
            warn_if_emulated(device)
    return optimizers, conversions, former


def _check_values(model: nn.Module) -> None:
    """Raise a ValueError for a parameter without values, or with a dtype that cannot be trained in low precision."""
    check_first(model)
    for name, p in model.named_parameters():
        check_plain(p, name)
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} belongs to a lazy module and has no shape yet; run a forward with one batch before msamp.initialize")
        if p.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values; call model.to_empty(device=...) and load its weights before "
                "msamp.initialize, which quantizes them"
            )
        if p.is_complex():
            raise ValueError(
                f"{name} is {p.dtype}, but complex parameters are not supported; store real and imaginary parts in one real "
                "parameter (torch.view_as_real), and combine them in forward by torch.view_as_complex"
            )
        if not p.is_floating_point() or p.itemsize == 1:  # FP8 codes are not values: a cast would lose their scales
            raise ValueError(
                f"{name} is {p.dtype}, which has no gradient; make it a buffer (module.register_buffer), and pass a base model that "
                "another library quantized in its floating-point form"
            )


def _check_model(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], recipe: Recipe, group: dist.ProcessGroup | None) -> None:
    for name, module in model.named_modules():
        # By name, to avoid importing FSDP.
        for kind in (each.__name__ for each in type(module).__mro__ if each.__name__ in _WRAPPERS):
            where = f" (around {name})" if name else ""
            raise ValueError(f"{kind}{where} does not support FP8 weights; {_WRAPPERS[kind]}")
    own_dtype_alone = not recipe.fp8 and recipe.states.grad == recipe.weight  # gradients have the format of the weights
    dtypes = (recipe.weight.dtype,) if own_dtype_alone else (torch.float32, torch.bfloat16)
    for name, p in model.named_parameters():
        if any(kind.__name__ == "DTensor" for kind in type(p).__mro__):  # by name, as above
            raise ValueError(f"{name} is a DTensor; {_UNCUT}, or call msamp.integrations.fsdp.prepare(model) before fully_shard")
        if p.dtype not in dtypes:
            raise ValueError(
                f"{name} is {p.dtype}; recipe {recipe.name!r} requires a model in {' or '.join(map(str, dtypes))} "
                f"({' or '.join(_CASTS[dtype] for dtype in dtypes)} before the optimizer is built)"
            )
    known = {id(p) for p in model.parameters()}
    given = [id(p) for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]]
    held = [each in known for each in given]
    if len(set(given)) < len(given):
        raise ValueError("a parameter is in two of the given optimizers; put each parameter in one of them")
    if not any(held):
        raise ValueError("the optimizer has no parameter of this model; build it from model.parameters()")
    shared = [name for name, module in model.named_modules() if isinstance(module, Experts) and module.ranks is not None]
    if group is not None and shared:
        raise ValueError(
            f"the experts of {shared[0]} are shared by several ranks, and the gradients of different experts would be averaged; build "
            "Experts without ranks, or train with the GPT trainer's --expert-model-parallel-size"
        )
    if group is not None and not all(held):
        raise ValueError(
            f"{held.count(False)} of the optimizer's {len(held)} parameters are not in this model, so their gradients would not be "
            "averaged over the ranks; build one optimizer per model"
        )
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in set(given)]
    if left and any(type(each).__name__ == "Muon" for each in optimizers):  # Muon only supports matrices
        raise ValueError(
            f"torch.optim.Muon leaves out {len(left)} parameters ({', '.join(left[:4])}); pass their optimizer too, as in "
            "msamp.initialize(model, [muon, torch.optim.AdamW(the others)]), or freeze them by requires_grad_(False)"
        )


def _start_equal(model: nn.Module, plan: list[str], refusal: ValueError | None, group: dist.ProcessGroup) -> None:
    """Broadcast the weights and buffers of the group's first rank, as DistributedDataParallel does. If a rank has an error, or another plan
    or model than the first, all ranks raise a ValueError."""
    held = [*model.named_parameters(), *model.named_buffers()] if refusal is None else []  # an invalid one may have no shape
    tensors = {name: x.detach() for name, x in held}
    wanting = {name for name, p in model.named_parameters() if p.requires_grad}
    described = [f"{name} {tuple(x.shape)} {x.dtype}{'' if name in wanting else ', no gradient'}" for name, x in tensors.items()]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (described + plan, None if refusal is None else str(refusal)), group=group)
    if refusal is not None:
        raise refusal
    for rank, (_, theirs) in enumerate(gathered):
        if theirs is not None:
            raise ValueError(f"rank {rank} of the group failed: {theirs}")
    lists = [described for described, _ in gathered]
    for rank, theirs in enumerate(lists):
        if theirs != lists[0]:
            differing = ", ".join(sorted(set(theirs) ^ set(lists[0]))[:4]) or "the order of their parameters"
            raise ValueError(f"ranks 0 and {rank} of the group have different models ({differing}); build the same one on every rank")
    for x in tensors.values():
        for part in (x.payload, x.scale_inv) if isinstance(x, ScalingTensor) else (x,):
            # As bytes, since collectives do not support float8.
            dist.broadcast(part.view(torch.uint8) if part.element_size() == 1 else part, group=group, group_src=0)
