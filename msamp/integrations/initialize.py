"""`msamp.initialize`: use a precision recipe in your own PyTorch loop with one call.

In a user's loop, the fields of a recipe mean:

- `gemm`: if it has FP8 GEMMs, linear layers become FP8Linear, and experts grouped FP8 products. Their weight is stored in `weight`, with a
  separate master if the master has another format.
- `formats_of` returns the formats of converted weights, of other matrices, and of norms and biases, as in the trainer. A plain FP32
  parameter is its own master.
- A parameter's gradient has the gradient format of its states; on several processes the average is sent in that format.
- `scales_loss`: such a recipe also requires control of the backward, and is for `msamp.amp`.
- `activations`: this depends on the modules for norms and activations, and the model's modules are not replaced.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from msamp.integrations import ms_amp
from msamp.integrations.loop_optimizer import LoopOptimizer, NoDistributedDataParallel, parameter_formats
from msamp.integrations.saving import save_plain
from msamp.integrations.second_stage import former_optimizers, release, take_masters
from msamp.integrations.takeover import (
    check_groups,
    check_optimizer,
    chosen_recipe,
    defaults_of,
    divide_parameters,
    joined_state,
    parameter_groups,
    retire,
)
from msamp.kernels.scaled_mm import warn_if_emulated
from msamp.nn.convert import Conversion, Survey, carry_out, plan_conversions, planned_weights, survey
from msamp.nn.expert_layer import Experts
from msamp.nn.filters import DEFAULT, Filter
from msamp.nn.linear import check_finite
from msamp.nn.scaling_state import ScalingState
from msamp.nn.swiglu_layers import behind_swiglu
from msamp.numerics.formats import Format
from msamp.numerics.recipe import Recipe
from msamp.numerics.tensor import ScalingTensor
from msamp.optim import updates
from msamp.optim.clip import check_max_norm
from msamp.parallel.data_parallel import grad_sync
from msamp.parallel.greedy_zero import ZeRO

_LOG = logging.getLogger("msamp")
_UNWRAPPED = "pass model.module: msamp averages the gradients itself"
_UNCUT = "pass the unsharded model: msamp averages the gradients itself, and shards the optimizer over the ranks with zero=True"
_WRAPPERS = {  # modules that wrap or shard other modules' weights, and what to do instead
    "DistributedDataParallel": _UNWRAPPED,
    "DataParallel": "pass model.module, and start one process per GPU with torchrun",
    "FullyShardedDataParallel": _UNCUT,
    "FSDPModule": _UNCUT,
}
_CASTS = {torch.float32: "model.float()", torch.bfloat16: "model.bfloat16()"}


def _ranks(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the data-parallel ranks, by default all of them; None for one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the given group; pass the group of its own data-parallel ranks")
    return (group or dist.group.WORLD) if dist.get_world_size(group) > 1 else None


def _given(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, recipe: Recipe
) -> list[torch.optim.Optimizer]:
    """Return the given optimizers after checking them; None becomes an AdamW."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    if not optimizers:
        raise ValueError("optimizer is an empty list; pass at least one, or None")
    for each in optimizers:
        check_optimizer(each, recipe)
    return optimizers


def _checked(
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
        optimizers = _given(model, optimizer, recipe)
        _check_model(model, optimizers, recipe, group)
        _check_muon(model, optimizers)
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
    for name, p in model.named_parameters():
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
        if not p.is_floating_point():
            raise ValueError(
                f"{name} is {p.dtype}, which has no gradient; make it a buffer (module.register_buffer), and pass a base model that "
                "another library quantized in its floating-point form"
            )


def _dtypes(recipe: Recipe) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a model's parameters may have; only the weights' own if gradients have the weights' format."""
    if not recipe.fp8 and recipe.states.grad == recipe.weight:
        return (recipe.weight.dtype,)
    return torch.float32, torch.bfloat16


def _check_model(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], recipe: Recipe, group: dist.ProcessGroup | None) -> None:
    for name, module in model.named_modules():
        # By name, to avoid importing FSDP.
        for kind in (each.__name__ for each in type(module).__mro__ if each.__name__ in _WRAPPERS):
            where = f" (around {name})" if name else ""
            raise ValueError(f"{kind}{where} does not support FP8 weights; {_WRAPPERS[kind]}")
    dtypes = _dtypes(recipe)
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


def _check_muon(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise a ValueError if Muon, which only supports matrices, leaves out parameters that no other given optimizer has."""
    given = {id(p) for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in given]
    if left and any(type(each).__name__ == "Muon" for each in optimizers):
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


def _low_precision_optimizer(
    model: nn.Module,
    groups: list[dict[str, Any]],
    recipe: Recipe,
    group: dist.ProcessGroup | None,
    zero: bool,
    **settings: Any,
) -> LoopOptimizer:
    """Return an optimizer whose step averages the gradients over the ranks and rolls the model's scales."""
    sync = None
    if group is not None:
        formats: dict[torch.Tensor, Format] = {p: parameter_formats(p, recipe).grad for p in model.parameters()}
        uncut = [p for g in groups for p, states in zip(g["params"], g["formats"], strict=True) if updates.by_name(states.update).whole]
        sync = grad_sync(model, formats, group, whole=uncut, shard=zero, accumulate=recipe.accumulator)
    shard = ZeRO(sync) if sync is not None and zero else None
    return LoopOptimizer(groups, recipe, ScalingState(model), sync, shard=shard, **settings)


def _report(survey: Survey, recipe: Recipe) -> None:
    """Log what is in FP8; warn if that is nothing, or less than half of the weight GEMMs."""
    if not survey.converted:
        warnings.warn(f"recipe {recipe.name!r} converted no layer, and the model trains as before:\n{survey}", stacklevel=4)
    elif survey.flop_share < 0.5:
        warnings.warn(f"less than half of the model's weight GEMMs are in FP8:\n{survey}", stacklevel=4)
    else:
        _LOG.info("%s", survey)


def _warn_of_untrained(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    given = {id(p) for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and p.dim() >= 2 and id(p) not in given]
    if left:
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        warnings.warn(
            f"no given optimizer has {', '.join(left[:4])}{more}, so they are not trained; pass all optimizers in a list, "
            "msamp.initialize(model, [first, second]), or freeze these parameters by requires_grad_(False)",
            stacklevel=4,
        )


def _converted(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    conversions: Mapping[nn.Module, Conversion],
    former: Sequence[LoopOptimizer],
    recipe: Recipe,
    accept: Filter,
    group: dist.ProcessGroup | None,
    zero: bool,
    smooth: Sequence[nn.Module],
    **settings: Any,
) -> tuple[nn.Module, LoopOptimizer]:
    """Convert the model's layers, of which `smooth` get channel scales; return the model and the optimizer that replaces the given ones."""
    if recipe.fp8 and (group is None or dist.get_rank(group) == 0):
        _report(survey(model, recipe, accept), recipe)
    _warn_of_untrained(model, optimizers)
    # A master is initialized from the weight before its rounding to FP8.
    masters: dict[torch.Tensor, torch.Tensor] = {}
    divided = carry_out(model, recipe, conversions, masters if recipe.weight != recipe.states.master else None)
    for optimizer in optimizers:
        divide_parameters(optimizer, divided)
    for layer in smooth:
        layer.scaling.add_channels(layer.in_features)  # type: ignore[union-attr, operator, arg-type]
    for each in former:
        masters |= take_masters(each)
        release(each)
    groups = [g for optimizer in optimizers for g in parameter_groups(optimizer, model, recipe)]
    low = _low_precision_optimizer(model, groups, recipe, group, zero, **settings, **defaults_of(optimizers[-1]))
    owned = {id(p) for g in low.param_groups for p in g["params"]}
    low.init_masters((p, values) for p, values in masters.items() if id(p) in owned)
    if any(optimizer.state for optimizer in optimizers):
        low.load_state_dict(joined_state(optimizers))
        for optimizer in optimizers:
            optimizer.state.clear()
    start = 0
    for optimizer in optimizers:
        end = start + len(optimizer.param_groups)
        retire(optimizer, low, None if len(optimizers) == 1 else slice(start, end))
        start = end
    if recipe.fp8 or group is not None:
        model._ddp_params_and_buffers_to_ignore = NoDistributedDataParallel()  # type: ignore[assignment]
    if callable(getattr(model, "save_pretrained", None)):
        save_plain(model, low)
    return model, low


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    recipe: str | Recipe | None = None,
    *,
    opt_level: str | None = None,
    fp8_recipe: str | None = None,
    accept: Filter = DEFAULT,
    group: dist.ProcessGroup | None = None,
    zero: bool | None = None,
    clip_grad: float | None = None,
    master_rounding: str | None = None,
    moment_rounding: str | None = None,
    grad_format: str | None = None,
    smooth_swiglu: bool = False,
    seed: int = 0,
) -> tuple[nn.Module, LoopOptimizer]:
    """Convert a model and its optimizer to a precision recipe (FP8-LM, levels of section 3; Collage, Table 2; COAT).

    | recipe | linear layers | gradients | master, m, v | model dtype |
    | --- | --- | --- | --- | --- |
    | "O1" | FP8, weight FP16 scaled | E4M3 | the weight, FP32, FP32 | FP32, BF16 |
    | "O2" | FP8, weight FP16 scaled | E4M3 | the weight, E4M3, FP16 scaled | FP32, BF16 |
    | "O3" | FP8, weight E4M3 | E4M3 | FP16 scaled, E4M3, FP16 scaled | FP32, BF16 |
    | "coat" | FP8, weight E4M3 | BF16 | FP32, COAT's E4M3 for both | FP32, BF16 |
    | "collage-light", "collage-plus", "collage-fp8", "bf16-a", "bf16-kahan", "bf16-dmw", "bf16-d" | unchanged | BF16 | Collage's | BF16 |
    | "bf16" (also "O0") | unchanged | FP32 | FP32 | FP32, BF16 |
    | "fp32" | unchanged | FP32 | FP32 | FP32 |

    In a recipe with FP8 layers, the linear layers that `accept` admits become FP8, and the table's columns for gradients, master, m and v
    describe their weights. A gradient is quantized once, after all micro-batches of the step have accumulated; run the backward of every
    micro-batch but the last under `optimizer.no_sync()`. Other matrices, such as embeddings and kernels of convolutions, keep their dtype
    and have BF16 gradients and the same moments. In FP32 they are their own masters; in BF16 they have a separate master in the table's
    format. Norms and biases have FP32 gradients and states. The model's own norms and activations are not replaced, so they save the same
    tensors for backward as before: build the model with `msamp.LayerNorm`, `msamp.RMSNorm` and `msamp.Activation` to save them in FP8
    groups.

    On one process, a recipe with FP8 gradients casts them during backward: `p.grad` has the parameter's dtype and stores one byte per
    element and a scale (`msamp.numerics.fp8_gradient`). A second backward before `zero_grad`, or any write other than clipping, widens it
    to the parameter's dtype. Under `optimizer.no_sync()` nothing is cast.

    On several processes, the optimizer replaces DistributedDataParallel, which does not support FP8 weights. All processes start from the
    weights and buffers of the group's first rank, send gradients during backward, and `step` uses the average over the ranks. So `p.grad`
    is None after backward: clip with `clip_grad` or `msamp.clip_grad_norm_`. torch's `clip_grad_norm_`, and other code that reads
    gradients, finds the average in `p.grad` only after `optimizer.synchronize()`.

    Experts (`msamp.Experts`, and those of transformers' Mixtral, OLMoE and Qwen3-MoE) become FP8 too. Each expert's matrix is then a
    separate parameter (`msamp.nn.expert_matrices`), and the optimizer's groups, names and states are divided accordingly.

    A model that was already initialized keeps its layers. The new optimizer takes the masters of the former one, whose `step` then raises.
    A recipe that stores or casts weights differently is rejected.

    The returned optimizer shares the given optimizer's groups, so a scheduler of either sets its learning rates; the given one's `step`
    raises. The logger `msamp` logs what is in FP8, and what is not and why (`msamp.survey`), and warns if less than half is in FP8. The
    `state_dict` of a model with `save_pretrained` is plain from now on (`msamp.save_plain`).

    Args:
        model: any module tree, changed in place.
        optimizer: torch.optim.AdamW, Adam, SGD or Muon over parameters of `model`, or a list of them, such as Muon
            for matrices and AdamW for the rest, which become one optimizer; None is AdamW with its defaults over all parameters. The
            momentum of SGD and Muon has the recipe's format of m. Collage's recipes and "coat" only support AdamW and Adam.
        recipe: a name in the table or from `msamp.recipes.register`, or a Recipe; None is O2. "fp16-amp" is for `msamp.amp.initialize`.
        opt_level: the same by its short name: "O0" to "O3", or another name of a recipe.
        fp8_recipe: how FP8 GEMMs cast their operands, instead of the recipe's casts: a key of `msamp.recipes.GEMMS`, "delayed",
            "tensorwise", "blockwise", "blockwise-power-of-two" or "mxfp8".
        accept: which linear layers to convert, see `msamp.filters`.
        group: the data-parallel ranks; None is all of torch.distributed, if that is initialized.
        zero: shard the optimizer over the ranks, see `ZeRO` (its `state_dict` is collective); None: as the recipe does (only O3).
        clip_grad: clip the global gradient norm to this in `step`, on any number of processes.
        master_rounding: rounding of masters narrower than FP32, "nearest" or "stochastic" (`msamp.numerics.stochastic_rounding`); None:
            as the recipe does.
        moment_rounding: the same for moments.
        grad_format: of the gradients of FP8 layers' weights, "fp8-e4m3", "fp8-e5m2", "fp16", "bf16" or "fp32"; None: as the recipe does.
            With "bf16" no gradient is rounded to FP8, in `p.grad`, on the wire and in the optimizer.
        smooth_swiglu: Smooth-SwiGLU: give each channel of SwiGLU's output a power-of-two scale of its own in its cast to FP8
            (`msamp.nn.channel_scales`), in modules that `msamp.nn.swiglu_layers.behind_swiglu` knows. Saved weights do not contain it.
        seed: of stochastic rounding. `optimizer.state_dict()` contains the parameters' keys that follow from it.

    Returns:
        The model, the same object, and the optimizer. The optimizer has `grad_sync`, its GradSync (bytes sent, statistics; None on one
        process), and `no_sync`, the context for gradient accumulation.

    Raises:
        ValueError: for an unknown recipe, gradient format or optimizer (listing those accepted), two recipes, a model in a dtype that the
            recipe does not support, `smooth_swiglu` without a known SwiGLU in FP8 or delayed scales, an optimizer option without a
            low-precision form, a weight that is not finite, a model in DDP or FSDP, or ranks whose models differ. No layer has been
            converted then.
    """
    ms_amp.check_alone()
    chosen = chosen_recipe(recipe, opt_level, fp8_recipe, master_rounding, moment_rounding, grad_format)
    group = _ranks(group)
    if clip_grad is not None:
        check_max_norm(clip_grad)
    optimizers, conversions, former = _checked(model, optimizer, chosen, accept, group)
    smooth = behind_swiglu(model, chosen, conversions) if smooth_swiglu else []
    zero = chosen.shards_optimizer if zero is None else zero
    return _converted(model, optimizers, conversions, former, chosen, accept, group, zero, smooth, clip_grad=clip_grad, seed=seed)
