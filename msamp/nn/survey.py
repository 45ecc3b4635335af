"""The decisions of a conversion: which modules of a model become FP8, which decoder layers run fused, and why the others do not.

Linear layers are torch.nn.Linear, the Conv1D of Hugging Face's GPT-2, the projections of torch.nn.MultiheadAttention, and the products of
experts: of `msamp.Experts`, and of transformers 5 for Mixtral, OLMoE and Qwen3-MoE. `msamp.nn.convert` follows these decisions.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import nn

from msamp.nn.decoder_families import known_alone
from msamp.nn.decoder_layer import FusedDecoderLayer, computes_known_loss, unrecognized, why_not_attention, why_not_mlp
from msamp.nn.expert_layer import Experts, HostExperts
from msamp.nn.filters import DEFAULT, Filter, why_refused
from msamp.nn.layer_gains import IN_BF16
from msamp.nn.linear import FP8Linear, Loading
from msamp.nn.multihead_attention import why_not
from msamp.nn.scaling_state import LinearScaling
from msamp.nn.vocabulary_loss import causal_lm_loss
from msamp.numerics.recipe import O2, Recipe, by_name
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
        why: the reason that it is not converted, or that it computes in BF16; "" if it is in FP8.
    """

    name: str
    elements: int
    why: str


class Half(NamedTuple):
    """The attention or the MLP of a decoder layer of transformers.

    Attributes:
        name: of the layer, dotted, and "attention" or "MLP".
        why: the reason that it does not run fused (`msamp.nn.decoder_layer`); "" if it does.
    """

    name: str
    why: str


@dataclass(frozen=True)
class Survey:
    """The modules of a model that are in FP8, or will be, and why the others are not; `str` prints a summary.

    Attributes:
        holders: every module that owns weight matrices.
        parameters: number of elements of all parameters, including embeddings, norms and biases.
        halves: of the decoder layers of transformers that `msamp.initialize` knows how to fuse.
        fused_loss: whether the model computes its loss by `msamp.nn.vocabulary_loss.causal_lm_loss`.
    """

    holders: tuple[Holder, ...]
    parameters: int
    halves: tuple[Half, ...] = ()
    fused_loss: bool = False

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
        for why, left in _by_reason(self.holders).items():
            share = sum(holder.elements for holder in left) / total
            names = _listed([holder.name or "the model itself" for holder in left])
            kind = "" if why.startswith(IN_BF16) else "not converted, "
            lines.append(f"  {kind}{why}: {names}; {share:.1%} of the FLOPs stay in 16 or 32 bits")
        if self.halves:
            unfused = _by_reason(self.halves)
            count = len(self.halves) - sum(map(len, unfused.values()))
            lines.append(f"{count} of {len(self.halves)} halves of decoder layers (attention, MLP) run fused")
            lines += ["the loss makes no FP32 copy of the logits"] if self.fused_loss else []
            lines += [f"  not fused, {why}: {_listed([half.name for half in left])}" for why, left in unfused.items()]
        return "\n".join(lines)


_Reasoned = TypeVar("_Reasoned", Holder, Half)


def _by_reason(all_: Iterable[_Reasoned]) -> dict[str, list[_Reasoned]]:
    """Return those that have a reason, by it."""
    reasons: dict[str, list[_Reasoned]] = {}
    for each in all_:
        if each.why:
            reasons.setdefault(each.why, []).append(each)
    return reasons


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def survey(model: nn.Module, recipe: Recipe | str = O2, accept: Filter = DEFAULT) -> Survey:
    """Report what `convert` will do with a model, without changing it. For a model that has FP8 layers it reports the current state, and
    `accept` only serves to explain why a layer may have been left out.

    Args:
        model: any module tree.
        recipe: or its name; without FP8 GEMMs nothing is converted.
        accept: as for `convert`.
    """
    return decide(model, by_name(recipe), accept, "it was left out of the conversion" if any(map(in_fp8, model.modules())) else "")


def decide(model: nn.Module, recipe: Recipe, accept: Filter, left_out: str = "") -> Survey:
    """Do the work of `survey`. A layer that `convert` would take gets the reason `left_out`; "" means that it is in FP8."""
    shared = _shared(model)
    within: set[int] = set()  # projections inside an attention module count as part of it
    low: set[int] = set()
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
            if in_fp8(module):  # unless it gains nothing (`msamp.nn.layer_gains`), or a guard has raised it
                scales = [part for part in module.modules() if isinstance(part, LinearScaling)]
                why = next((part.in_bf16 or f"{IN_BF16} by its guard" for part in scales if part.in_bf16 or part.raised), "")
            else:
                why = _why_left(name, module, tied, recipe, accept) or left_out
            holders.append(Holder(name, sum(p.numel() for p in weights), why))
            low |= {id(module)} if not why and not in_fp8(module) else set()
    halves = tuple(Half(f"{name} {half}", why) for name, module in model.named_modules() for half, why in _halves(module, low))
    some = any(not half.why for half in halves) or any(known_alone(type(module)) for module in model.modules())
    taken = low and some and any(map(computes_known_loss, model.modules()))
    fused_loss = bool(taken) or any(vars(module).get("_loss_function") is causal_lm_loss for module in model.modules())
    return Survey(tuple(holders), sum(p.numel() for p in model.parameters()), halves, fused_loss)


def _halves(module: nn.Module, low: set[int]) -> list[tuple[str, str]]:
    """Return the halves of a decoder layer with the reason why each does not run fused, or will not when the layers of `low` are in FP8;
    none for another module."""
    unknown = unrecognized(module)
    if unknown is None:
        return []
    if not unknown and not isinstance(module, FusedDecoderLayer) and not low:
        unknown = "it was not fused at the conversion"
    return [(half, unknown or why(module, low)) for half, why in (("attention", why_not_attention), ("MLP", why_not_mlp))]


def _why_left(name: str, module: nn.Module, tied: bool, recipe: Recipe, accept: Filter) -> str:
    """Return why a module with plain weight matrices will not be converted; "" if it will."""
    if isinstance(module, _CONVOLUTIONS):
        return "a convolution"
    if type(module) is nn.Linear or is_conv1d(module) or type(module) is nn.MultiheadAttention:
        own = _reads_otherwise(module)
        if own:
            return own
    linear, experts = _as_linear(module), as_experts(module)
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
    return why_not(module) or next(
        (why for part, part_of in parts.items() if (why := why_refused(accept, dotted(name, part), part_of))), ""
    )


def _why_experts_left(name: str, module: nn.Module, experts: type[Experts], recipe: Recipe, accept: Filter) -> str:
    """Return why a module of experts will not be converted; "" if it will."""
    assert recipe.gemm is not None
    weights = [module._parameters.get(weight) for weight in experts.weight_names]
    if any(weight is None for weight in weights):
        return "its weights are computed from other parameters"
    if "forward" in vars(module):
        return "its forward was replaced (accelerate hooks, or by hand) and may read the weights directly"
    if name.endswith("base_layer"):
        return "PEFT adapts its weights (target_parameters), which E separate matrices would replace"
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
        why = why_refused(accept, dotted(name, weight), nn.Linear(inputs, outputs, device="meta"))
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


def in_fp8(module: nn.Module) -> bool:
    if isinstance(module, FP8Linear):  # pruning and torch's parametrizations replace `weight` by a plain tensor
        return isinstance(module.weight, ScalingTensor)
    return isinstance(module, Loading) and any(isinstance(p, ScalingTensor) for p in module.parameters(recurse=False))


def _as_linear(module: nn.Module) -> nn.Linear | None:
    """Return a module as the linear layer that filters see; None if it cannot be converted."""
    if type(module) is nn.Linear:
        return module
    if is_conv1d(module):
        inputs, outputs = module.get_parameter("weight").shape
        return nn.Linear(inputs, outputs, device="meta")
    return None


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's Conv1D, recognized by name, since transformers may not be installed."""
    kind = type(module)
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def as_experts(module: nn.Module) -> type[Experts] | None:
    """Return the class that a module of experts will have; None if it is not one. Those of transformers are recognized by name."""
    kind = type(module)
    if kind is Experts:
        return Experts
    return HostExperts if _HOST_EXPERTS.get(kind.__qualname__) == kind.__module__ else None


def dotted(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
