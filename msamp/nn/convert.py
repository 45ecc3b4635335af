"""Conversion of any module tree: linear layers that a filter accepts become FP8Linear, everything else is unchanged.

`msamp.nn.survey` decides which modules these are, and lists every module with weight matrices and why it is or is not converted.
"""

import copy
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from msamp.nn.expert_layer import Experts
from msamp.nn.expert_matrices import ExpertMatrices
from msamp.nn.filters import DEFAULT, Filter
from msamp.nn.linear import FP8Conv1D, FP8Linear, Loading, check_finite, scaling_parameter
from msamp.nn.multihead_attention import FP8MultiheadAttention
from msamp.nn.parameter_swap import check_swappable, swap_contents_
from msamp.nn.scaling_state import LinearScaling
from msamp.nn.survey import as_experts, decide, dotted, is_conv1d
from msamp.numerics.recipe import Recipe, by_name
from msamp.numerics.tensor import ScalingTensor


def convert(model: nn.Module, recipe: Recipe | str, accept: Filter = DEFAULT) -> nn.Module:
    """Convert linear layers to FP8Linear in place. Layers and Parameters remain the same objects, with their hooks and attributes.

    Experts are the exception: each weight [E, N, K] is replaced by E parameters (`msamp.nn.expert_matrices`), so build optimizers after
    `convert`; `msamp.initialize` divides those that it is given.

    Only a plain `torch.nn.Linear`, Hugging Face's Conv1D and a plain `torch.nn.MultiheadAttention` are converted: a subclass may read its
    weight directly. A weight that two modules share (an LM head tied to its embedding) is not converted, because the other module could
    not read it. `survey` lists what is not converted, and why.

    Args:
        model: any module tree, or a single Linear.
        recipe: with FP8 GEMMs, or its name; any other leaves the model unchanged.
        accept: predicate over (dotted name, layer), see `msamp.nn.filters`; a MultiheadAttention requires `in_proj` and `out_proj`.

    Returns:
        The model.

    Raises:
        ValueError: before any conversion, if a weight has NaN or Inf, or a view of it is alive; the message names the weight, and who
            holds the view (`msamp.nn.parameter_swap`).
    """
    recipe = by_name(recipe)
    conversions = plan_conversions(model, recipe, accept)
    for name, p in planned_weights(conversions).items():
        check_finite(p, name)
    carry_out(model, recipe, conversions)
    return model


class PlannedWeight(NamedTuple):
    """A weight that will be converted: the attribute of its module, its name in the model, and the scales of its product's casts."""

    attribute: str
    name: str
    scaling: LinearScaling


class Conversion(NamedTuple):
    """The planned conversion of one module to the class `kind`, with the weights that it converts, one or, for experts, two."""

    kind: type[nn.Module]
    weights: tuple[PlannedWeight, ...]


def planned_weights(conversions: Mapping[nn.Module, Conversion]) -> dict[str, nn.Parameter]:
    """Return the weights that will be converted, by name in the model."""
    return {weight.name: module.get_parameter(weight.attribute) for module, planned in conversions.items() for weight in planned.weights}


def plan_conversions(model: nn.Module, recipe: Recipe, accept: Filter = DEFAULT) -> dict[nn.Module, Conversion]:
    """Return the conversions that `convert` will do, without checking that weights are finite. Arguments and errors as in `convert`."""
    conversions: dict[nn.Module, Conversion] = {}
    rounded = [name for name, x in model.named_buffers() if name.endswith("inv_freq") and x.itemsize == 2]  # transformers'
    if rounded:  # up to 15 radians off at token 8,000. No error: runs that began so go on, whose weights know no other angles
        fix = "begin new runs with from_pretrained(dtype=..) or from_config(.., dtype=..), which keep it in FP32, as readers of exports do"
        warnings.warn(f"{rounded[0]} is in 16 bits, which rounds rotary angles by up to 1 in 512: {fix}", stacklevel=2)

    def plan(module: nn.Module, kind: type[nn.Module], name: str, *attributes: str) -> None:
        assert recipe.gemm is not None
        conversions[module] = Conversion(
            kind,
            tuple(
                PlannedWeight(attribute, dotted(name, attribute), LinearScaling(recipe.gemm, device=module.get_parameter(attribute).device))
                for attribute in attributes
            ),
        )

    for name in decide(model, recipe, accept).converted:
        module = model.get_submodule(name)
        if isinstance(module, Loading):
            continue
        experts = as_experts(module)
        if experts is not None:
            plan(module, experts, name, *experts.weight_names)
        elif isinstance(module, nn.MultiheadAttention):
            plan(module, FP8MultiheadAttention, name, "in_proj_weight")
            plan(module.out_proj, FP8Linear, dotted(name, "out_proj"), "weight")
        else:
            plan(module, FP8Conv1D if is_conv1d(module) else FP8Linear, name, "weight")
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
        if not issubclass(kind, Experts):
            _convert_linear(module, kind, weights[0], recipe, former)
            continue
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
    for parent in model.modules():
        # torch's fused inference path, and the nested tensors that it uses, would read weights as plain tensors.
        if isinstance(parent, nn.TransformerEncoderLayer) and any(isinstance(m, Loading) for m in (parent.linear1, parent.self_attn)):
            parent.activation_relu_or_gelu = 0
        if isinstance(parent, nn.TransformerEncoder) and any(isinstance(m, Loading) for m in parent.modules()):
            parent.use_nested_tensor = False
        if type(getattr(parent, "base_layer", None)) is FP8Conv1D:  # PEFT adapts a weight that was [in, out] and is [out, in] now
            for part in (part for part in parent.modules() if hasattr(part, "fan_in_fan_out")):
                part.fan_in_fan_out = False  # type: ignore[assignment]
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


def float_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy whose parameters and buffers are plain FP32, BF16 ones too; its layers compute as torch's do.

    Use it to average weights, which needs more bits than FP8 and BF16 have: `AveragedModel(msamp.float_copy(model), ...)`. Parameters and
    buffers have the same number and order as in the model, as `update_parameters(model)` requires.
    """
    wide = copy.deepcopy(model)
    for module in wide.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if isinstance(p, ScalingTensor):
                setattr(module, name, nn.Parameter(p.dequantize(torch.float32), p.requires_grad))
    return wide.float()
