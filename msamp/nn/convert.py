"""Conversion of any module tree: linear layers that a filter accepts become FP8Linear, everything else is unchanged.

Linear layers are torch.nn.Linear, the Conv1D of Hugging Face's GPT-2, and the projections of torch.nn.MultiheadAttention. `survey` lists
every module with weight matrices and why it is or is not converted; `convert` follows the same decisions.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from msamp.nn.filters import DEFAULT, Filter, why_refused
from msamp.nn.linear import FP8Conv1D, FP8Linear, Loading, check_finite, scaling_parameter
from msamp.nn.multihead_attention import FP8MultiheadAttention, why_not
from msamp.nn.parameter_swap import check_swappable, swap_contents_
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.recipe import O2, Recipe
from msamp.numerics.tensor import PLAIN, ScalingTensor

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SHOWN = 3  # names listed per reason


class Holder(NamedTuple):
    """A module with weight matrices of its own.

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
        holders: every module with weight matrices of its own.
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
        for why, left in self._reasons().items():
            more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
            names = ", ".join(holder.name or "the model itself" for holder in left[:_SHOWN])
            share = sum(holder.elements for holder in left) / total
            lines.append(f"  not converted, {why}: {names}{more}; {share:.1%} of the FLOPs stay in 16 or 32 bits")
        return "\n".join(lines)

    def _reasons(self) -> dict[str, list[Holder]]:
        reasons: dict[str, list[Holder]] = {}
        for holder in self.holders:
            if holder.why:
                reasons.setdefault(holder.why, []).append(holder)
        return reasons


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
    linear = _as_linear(module)
    if linear is None and type(module) is not nn.MultiheadAttention:
        return _what_else(module)
    if recipe.gemm is None:
        return f"recipe {recipe.name} has no FP8 GEMM"
    if tied:
        return "another module holds the same weight"
    if linear is not None:
        return why_refused(accept, name, linear)
    assert isinstance(module, nn.MultiheadAttention)
    parts = {"in_proj": nn.Linear(module.embed_dim, 3 * module.embed_dim, device="meta"), "out_proj": module.out_proj}
    return why_not(module) or next((why for part, each in parts.items() if (why := why_refused(accept, _join(name, part), each))), "")


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
    shared = {each for each, count in held.items() if count > 1}
    spans = sorted((*_span(p), id(p)) for p in model.parameters() if type(p) in PLAIN and p.numel() and not p.is_meta)
    end, last = -1, 0
    for start, stop, each in spans:
        if start < end:
            shared |= {each, last}
        if stop > end:
            end, last = stop, each
    return shared


def _span(p: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and after its last."""
    last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
    return p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size()


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


def _what_else(module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, nn.Linear):
        return f"{kind}, a subclass of Linear that may read its weight directly"
    own = [f"{name} {tuple(p.shape)}" for name, p in module.named_parameters(recurse=False) if p.dim() >= 2]
    return f"{kind} reads its own parameters ({', '.join(own[:_SHOWN])}), and only linear layers are converted"


def convert(model: nn.Module, recipe: Recipe, accept: Filter = DEFAULT) -> nn.Module:
    """Convert linear layers to FP8Linear in place. Layers and Parameters remain the same objects, with their hooks and attributes.

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
    for module, planned in conversions.items():
        check_finite(module.get_parameter(planned.attribute), planned.name)
    carry_out(model, recipe, conversions)
    return model


class Conversion(NamedTuple):
    """The planned conversion of one module.

    Attributes:
        kind: its new class.
        attribute: the attribute that holds the weight.
        name: the weight's name in the model.
        scaling: the scales of its casts.
    """

    kind: type[Loading]
    attribute: str
    name: str
    scaling: LinearScaling


def plan_conversions(model: nn.Module, recipe: Recipe, accept: Filter = DEFAULT) -> dict[nn.Module, Conversion]:
    """Return the conversions that `convert` will do, without checking that weights are finite. Arguments and errors as in `convert`."""
    conversions: dict[nn.Module, Conversion] = {}

    def plan(module: nn.Module, kind: type[Loading], attribute: str, name: str) -> None:
        assert recipe.gemm is not None
        scaling = LinearScaling(recipe.gemm, device=module.get_parameter(attribute).device)
        conversions[module] = Conversion(kind, attribute, _join(name, attribute), scaling)

    for name in _survey(model, recipe, accept).converted:
        module = model.get_submodule(name)
        if isinstance(module, Loading):
            continue
        if isinstance(module, nn.MultiheadAttention):
            plan(module, FP8MultiheadAttention, "in_proj_weight", name)
            plan(module.out_proj, FP8Linear, "weight", _join(name, "out_proj"))
        else:
            plan(module, FP8Conv1D if _is_conv1d(module) else FP8Linear, "weight", name)
    check_swappable({planned.name: module.get_parameter(planned.attribute) for module, planned in conversions.items()})
    return conversions


def carry_out(
    model: nn.Module,
    recipe: Recipe,
    conversions: Mapping[nn.Module, Conversion],
    former: dict[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Do the conversions of `plan_conversions`; the weights must be finite.

    former: receives each Parameter's values before rounding, [outputs, inputs], for master weights; None frees them layer by layer.
    """
    for module, (kind, attribute, name, scaling) in conversions.items():
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
    for parent in model.modules():
        # torch's fused inference path, and the nested tensors that it uses, would read weights as plain tensors.
        if isinstance(parent, nn.TransformerEncoderLayer) and any(isinstance(m, Loading) for m in (parent.linear1, parent.self_attn)):
            parent.activation_relu_or_gelu = 0
        if isinstance(parent, nn.TransformerEncoder) and any(isinstance(m, Loading) for m in parent.modules()):
            parent.use_nested_tensor = False


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _low_precision(model: nn.Module) -> Iterator[tuple[nn.Module, str, ScalingTensor]]:
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if isinstance(p, ScalingTensor):
                yield module, name, p


def float_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy with plain FP32 parameters instead of low-precision weights; its layers compute as torch's do.

    Use it to average weights, which needs more bits than FP8 has: `AveragedModel(msamp.float_copy(model), ...)`. Parameters and buffers
    have the same number and order as in the model, as `update_parameters(model)` requires.
    """
    wide = copy.deepcopy(model)
    for module, name, p in list(_low_precision(wide)):
        setattr(module, name, nn.Parameter(p.dequantize(torch.float32), p.requires_grad))
    return wide
