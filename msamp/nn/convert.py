"""Conversion of any module tree: linear layers that a filter accepts become FP8Linear, everything else is unchanged.

Linear layers are torch.nn.Linear, the Conv1D of Hugging Face's GPT-2, the projections of torch.nn.MultiheadAttention, and the products of
experts: of `msamp.Experts`, and of transformers 5 for Mixtral, OLMoE and Qwen3-MoE. `survey` lists every module with weight matrices and
why it is or is not converted; `convert` follows the same decisions.
"""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from msamp.nn.expert_layer import Experts, HostExperts
from msamp.nn.expert_matrices import ExpertMatrices
from msamp.nn.filters import DEFAULT, Filter, why_refused
from msamp.nn.linear import FP8Conv1D, FP8Linear, Loading, check_finite, scaling_parameter
from msamp.nn.multihead_attention import FP8MultiheadAttention, why_not
from msamp.nn.parameter_swap import check_swappable, swap_contents_
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.recipe import O2, Recipe
from msamp.numerics.tensor import PLAIN, ScalingTensor

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_HOST_EXPERTS = {  # class -> its file in transformers: concatenated gate and up, no bias
    "MixtralExperts": "transformers.models.mixtral.modeling_mixtral",
    "OlmoeExperts": "transformers.models.olmoe.modeling_olmoe",
    "Qwen3MoeExperts": "transformers.models.qwen3_moe.modeling_qwen3_moe",
}
_GROUPED = 16  # the grouped FP8 GEMMs load rows whose length is a multiple of it
_SHOWN = 3  # names listed per reason


class Holder(NamedTuple):
    """A module that owns weight matrices.

    Attributes:
        name: dotted.
        elements: number of elements of these weights.
        why: the reason that it is not converted; "" if it is in FP8.
    """

    name: str
    elements: int
    why: str


@dataclass(frozen=True)
class Survey:
    """The modules of a model that are in FP8, or will be, and why the others are not; `str` prints a summary.

    Attributes:
        holders: every module that owns weight matrices.
        parameters: number of elements of all parameters, including embeddings, norms and biases.
    """

    holders: tuple[Holder, ...]
    parameters: int

    @property
    def converted(self) -> list[str]:
        """Names of the layers in FP8."""
        return [holder.name for holder in self.holders if not holder.why]

    @property
    def left(self) -> dict[str, str]:
        """Name of each module that is not converted -> reason."""
        return {holder.name: holder.why for holder in self.holders if holder.why}

    @property
    def parameter_share(self) -> float:
        """Fraction of all parameters that is in FP8."""
        return self._elements / max(1, self.parameters)

    @property
    def flop_share(self) -> float:
        """Fraction of the weight GEMMs' FLOPs that is in FP8. Each weight counts once, because the positions of a convolution and the
        tokens of an expert are unknown before a forward. Attention scores have no weight and do not count."""
        return self._elements / max(1, sum(holder.elements for holder in self.holders))

    @property
    def _elements(self) -> int:
        return sum(holder.elements for holder in self.holders if not holder.why)

    def __str__(self) -> str:
        counted = f"{len(self.converted)} of {len(self.holders)} layers with weights are in FP8"
        lines = [f"{counted}: {self.parameter_share:.1%} of the parameters, {self.flop_share:.1%} of the FLOPs (each weight once)"]
        total = max(1, sum(holder.elements for holder in self.holders))
        reasons: dict[str, list[Holder]] = {}
        for holder in self.holders:
            if holder.why:
                reasons.setdefault(holder.why, []).append(holder)
        for why, left in reasons.items():
            more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
            names = ", ".join(holder.name or "the model itself" for holder in left[:_SHOWN])
            share = sum(holder.elements for holder in left) / total
            lines.append(f"  not converted, {why}: {names}{more}; {share:.1%} of the FLOPs stay in 16 or 32 bits")
        return "\n".join(lines)


def survey(model: nn.Module, recipe: Recipe = O2, accept: Filter = DEFAULT) -> Survey:
    """Report what `convert` will do with a model, without changing it. For a model that has FP8 layers it reports the current state, and
    `accept` only serves to explain why a layer may have been left out.

    Args:
        model: any module tree.
        recipe: without FP8 GEMMs nothing is converted.
        accept: as for `convert`.
    """
    return _survey(model, recipe, accept, "it was left out of the conversion" if any(map(_in_fp8, model.modules())) else "")


def _survey(model: nn.Module, recipe: Recipe, accept: Filter, left_out: str = "") -> Survey:
    """Do the work of `survey`. A layer that `convert` would take gets the reason `left_out`; "" means that it is in FP8."""
    shared = _shared(model)
    within: set[int] = set()  # projections inside an attention module count as part of it
    holders = []
    for name, module in model.named_modules():
        weights = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
        if id(module) in within or isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if isinstance(module, nn.MultiheadAttention):
            within.add(id(module.out_proj))
            weights.append(module.out_proj.weight)
        if weights:
            tied = any(id(p) in shared for p in weights)
            why = "" if _in_fp8(module) else _why_left(name, module, tied, recipe, accept) or left_out
            holders.append(Holder(name, sum(p.numel() for p in weights), why))
    return Survey(tuple(holders), sum(p.numel() for p in model.parameters()))


def _why_left(name: str, module: nn.Module, tied: bool, recipe: Recipe, accept: Filter) -> str:
    """Return why a module with plain weight matrices will not be converted; "" if it will."""
    if isinstance(module, _CONVOLUTIONS):
        return "a convolution"
    if type(module) is nn.Linear or _is_conv1d(module) or type(module) is nn.MultiheadAttention:
        own = _reads_otherwise(module)
        if own:
            return own
    linear, experts = _as_linear(module), _as_experts(module)
    if linear is None and experts is None and type(module) is not nn.MultiheadAttention:
        kind = type(module).__name__
        if isinstance(module, nn.Linear):
            return f"{kind}, a subclass of Linear that may read its weight directly"
        read = [f"{name} {tuple(p.shape)}" for name, p in module.named_parameters(recurse=False) if p.dim() >= 2]
        return f"{kind} reads its own parameters ({', '.join(read[:_SHOWN])}), and only linear layers are converted"
    if recipe.gemm is None:
        return f"recipe {recipe.name} has no FP8 GEMM"
    if tied:
        return "another module holds the same weight"
    if experts is not None:
        return _why_experts_left(name, module, experts, recipe, accept)
    if linear is not None:
        return why_refused(accept, name, linear)
    assert isinstance(module, nn.MultiheadAttention)
    parts = {"in_proj": nn.Linear(module.embed_dim, 3 * module.embed_dim, device="meta"), "out_proj": module.out_proj}
    return why_not(module) or next((why for part, part_of in parts.items() if (why := why_refused(accept, _join(name, part), part_of))), "")


def _why_experts_left(name: str, module: nn.Module, experts: type[Experts], recipe: Recipe, accept: Filter) -> str:
    """Return why a module of experts will not be converted; "" if it will."""
    assert recipe.gemm is not None
    weights = [module._parameters.get(weight) for weight in experts.weight_names]
    if any(weight is None for weight in weights):
        return "its weights are computed from other parameters"
    if "forward" in vars(module):
        return "its forward was replaced (accelerate hooks, or by hand) and may read the weights directly"
    if not recipe.gemm.fusible:
        return f"experts need one scale per tensor, from its amax or history, but the recipe casts inputs as {recipe.gemm.input}"
    act = getattr(module, "act_fn", None)
    if experts is HostExperts and type(act).__name__ not in ("SiLU", "SiLUActivation"):
        return f"its experts have the activation {type(act).__name__}, not SwiGLU's SiLU"
    for weight, p in zip(experts.weight_names, weights, strict=True):
        assert p is not None
        _, outputs, inputs = p.shape
        if outputs % _GROUPED or inputs % _GROUPED:
            return f"{weight} is [{outputs}, {inputs}] per expert; grouped FP8 GEMMs need multiples of {_GROUPED}"
        if p._backward_hooks or p._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            return f"{weight} has gradient hooks, which E separate matrices cannot take over; register them after the conversion"
        why = why_refused(accept, _join(name, weight), nn.Linear(inputs, outputs, device="meta"))
        if why:
            return why
    return ""


def _reads_otherwise(module: nn.Module) -> str:
    """Return why a module of a convertible class does not compute what its class does; "" if it does."""
    parts = [("in_proj_weight", module), ("weight", module.out_proj)] if isinstance(module, nn.MultiheadAttention) else [("weight", module)]
    for attribute, part in parts:
        if attribute not in part._parameters:
            return "its weight is computed from other parameters (weight_norm, spectral_norm, pruning)"
        if "forward" in vars(part):
            return "its forward was replaced (accelerate hooks, or by hand) and may read the weight directly"
    return ""


def _shared(model: nn.Module) -> set[int]:
    """Return the id of each parameter that two modules hold, or that shares memory with another parameter of the model."""
    held = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    shared = {name for name, count in held.items() if count > 1}
    memory = []  # addresses of a tensor's first byte and after its last
    for p in model.parameters():
        if type(p) in PLAIN and p.numel() and not p.is_meta:
            last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            memory.append((p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size(), id(p)))
    end, last = -1, 0
    for start, stop, name in sorted(memory):
        if start < end:
            shared |= {name, last}
        if stop > end:
            end, last = stop, name
    return shared


def _in_fp8(module: nn.Module) -> bool:
    if isinstance(module, FP8Linear):  # pruning and torch's parametrizations replace `weight` by a plain tensor
        return isinstance(module.weight, ScalingTensor)
    return isinstance(module, Loading) and any(isinstance(p, ScalingTensor) for p in module.parameters(recurse=False))


def _as_linear(module: nn.Module) -> nn.Linear | None:
    """Return a module as the linear layer that filters see; None if it cannot be converted."""
    if type(module) is nn.Linear:
        return module
    if _is_conv1d(module):
        inputs, outputs = module.get_parameter("weight").shape
        return nn.Linear(inputs, outputs, device="meta")
    return None


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's Conv1D, recognized by name, since transformers may not be installed."""
    kind = type(module)
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def _as_experts(module: nn.Module) -> type[Experts] | None:
    """Return the class that a module of experts will have; None if it is not one. Those of transformers are recognized by name."""
    kind = type(module)
    if kind is Experts:
        return Experts
    return HostExperts if _HOST_EXPERTS.get(kind.__qualname__) == kind.__module__ else None


def convert(model: nn.Module, recipe: Recipe, accept: Filter = DEFAULT) -> nn.Module:
    """Convert linear layers to FP8Linear in place. Layers and Parameters remain the same objects, with their hooks and attributes.

    Experts are the exception: each weight [E, N, K] is replaced by E parameters (`msamp.nn.expert_matrices`), so build optimizers after
    `convert`; `msamp.initialize` divides those that it is given.

    Only a plain `torch.nn.Linear`, Hugging Face's Conv1D and a plain `torch.nn.MultiheadAttention` are converted: a subclass may read its
    weight directly. A weight that two modules share (an LM head tied to its embedding) is not converted, because the other module could
    not read it. `survey` lists what is not converted, and why.

    Args:
        model: any module tree, or a single Linear.
        recipe: with FP8 GEMMs; any other leaves the model unchanged.
        accept: predicate over (dotted name, layer), see `msamp.nn.filters`; a MultiheadAttention requires `in_proj` and `out_proj`.

    Returns:
        The model.

    Raises:
        ValueError: before any conversion, if a weight has NaN or Inf, or a view of it is alive; the message names the weight, and who
            holds the view (`msamp.nn.parameter_swap`).
    """
    conversions = plan_conversions(model, recipe, accept)
    for name, p in planned_weights(conversions).items():
        check_finite(p, name)
    carry_out(model, recipe, conversions)
    return model


class PlannedWeight(NamedTuple):
    """A weight that will be converted.

    Attributes:
        attribute: the attribute of its module.
        name: its name in the model.
        scaling: the scales of its product's casts.
    """

    attribute: str
    name: str
    scaling: LinearScaling


class Conversion(NamedTuple):
    """The planned conversion of one module.

    Attributes:
        kind: its new class.
        weights: those it will convert, one or, for experts, two.
    """

    kind: type[nn.Module]
    weights: tuple[PlannedWeight, ...]


def planned_weights(conversions: Mapping[nn.Module, Conversion]) -> dict[str, nn.Parameter]:
    """Return the weights that will be converted, by name in the model."""
    return {weight.name: module.get_parameter(weight.attribute) for module, planned in conversions.items() for weight in planned.weights}


def plan_conversions(model: nn.Module, recipe: Recipe, accept: Filter = DEFAULT) -> dict[nn.Module, Conversion]:
    """Return the conversions that `convert` will do, without checking that weights are finite. Arguments and errors as in `convert`."""
    conversions: dict[nn.Module, Conversion] = {}

    def plan(module: nn.Module, kind: type[nn.Module], name: str, *attributes: str) -> None:
        assert recipe.gemm is not None
        conversions[module] = Conversion(
            kind,
            tuple(
                PlannedWeight(attribute, _join(name, attribute), LinearScaling(recipe.gemm, device=module.get_parameter(attribute).device))
                for attribute in attributes
            ),
        )

    for name in _survey(model, recipe, accept).converted:
        module = model.get_submodule(name)
        if isinstance(module, Loading):
            continue
        experts = _as_experts(module)
        if experts is not None:
            plan(module, experts, name, *experts.weight_names)
        elif isinstance(module, nn.MultiheadAttention):
            plan(module, FP8MultiheadAttention, name, "in_proj_weight")
            plan(module.out_proj, FP8Linear, _join(name, "out_proj"), "weight")
        else:
            plan(module, FP8Conv1D if _is_conv1d(module) else FP8Linear, name, "weight")
    check_swappable(planned_weights(conversions))
    return conversions


def carry_out(
    model: nn.Module,
    recipe: Recipe,
    conversions: Mapping[nn.Module, Conversion],
    former: dict[torch.Tensor, torch.Tensor] | None = None,
) -> dict[torch.Tensor, list[nn.Parameter]]:
    """Do the conversions of `plan_conversions`; the weights must be finite.

    former: receives each Parameter's values before rounding, [outputs, inputs], for master weights; None frees them layer by layer.

    Returns:
        Each weight of experts, which the model no longer has and which is empty now -> the parameters, one per expert, that replace it. All
        other Parameters remain the same objects.
    """
    divided: dict[torch.Tensor, list[nn.Parameter]] = {}
    for module, (kind, weights) in conversions.items():
        if issubclass(kind, Experts):
            divided |= _divide_experts(module, kind, weights, recipe, former)
        else:
            _convert_linear(module, kind, weights[0], recipe, former)
    for parent in model.modules():
        # torch's fused inference path, and the nested tensors that it uses, would read weights as plain tensors.
        if isinstance(parent, nn.TransformerEncoderLayer) and any(isinstance(m, Loading) for m in (parent.linear1, parent.self_attn)):
            parent.activation_relu_or_gelu = 0
        if isinstance(parent, nn.TransformerEncoder) and any(isinstance(m, Loading) for m in parent.modules()):
            parent.use_nested_tensor = False
    return divided


def _convert_linear(
    module: nn.Module, kind: type[nn.Module], weight: PlannedWeight, recipe: Recipe, former: dict[torch.Tensor, torch.Tensor] | None
) -> None:
    attribute, name, scaling = weight
    p, turned = module.get_parameter(attribute), kind is FP8Conv1D
    values = p.detach().t() if turned else p.detach()
    swap_contents_(p, scaling_parameter(values, recipe, p.requires_grad, name), transposed=turned)
    if former is not None:
        former[p] = values
    # Change the class of the existing object, so that its hooks and other references to it stay valid.
    module.__class__ = kind
    if issubclass(kind, FP8Linear):
        module.out_features, module.in_features = p.shape  # type: ignore[assignment]
    if turned:
        p.stored_transposed = True  # type: ignore[attr-defined]  # for the states of an existing optimizer
    module.add_module("scaling", scaling)
    module.watch_weights()  # type: ignore[operator]


def _divide_experts(
    module: nn.Module,
    kind: type[Experts],
    weights: tuple[PlannedWeight, ...],
    recipe: Recipe,
    former: dict[torch.Tensor, torch.Tensor] | None,
) -> dict[torch.Tensor, list[nn.Parameter]]:
    """Replace the weights of experts by one parameter per expert, and return the replacements."""
    divided: dict[torch.Tensor, list[nn.Parameter]] = {}
    module.__class__ = kind
    assert isinstance(module, Experts)
    for attribute, name, scaling in weights:
        whole = module.get_parameter(attribute)
        matrices = ExpertMatrices(whole, recipe, scaling, name, module.first)
        del module._parameters[attribute]
        module.add_module(attribute, matrices)
        divided[whole] = matrices.matrices
        if former is not None:
            former |= zip(matrices.matrices, whole.detach().unbind(), strict=True)
        # Its memory is freed, and code that still holds it fails rather than use values that no longer change.
        whole.grad, whole.data = None, whole.new_empty(0)
    return divided


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def float_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy with plain FP32 parameters instead of low-precision weights; its layers compute as torch's do.

    Use it to average weights, which needs more bits than FP8 has: `AveragedModel(msamp.float_copy(model), ...)`. Parameters and buffers
    have the same number and order as in the model, as `update_parameters(model)` requires.
    """
    wide = copy.deepcopy(model)
    for module in wide.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if isinstance(p, ScalingTensor):
                setattr(module, name, nn.Parameter(p.dequantize(torch.float32), p.requires_grad))
    return wide
