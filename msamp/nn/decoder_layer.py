"""Decoder layers of transformers that run as the trainer's layers do, with their parameters, names, hooks and attention.

`fuse` recognizes a layer by its class and by the names that its forward uses, and changes the class of the object to a subclass of its own
class: nothing is added or moved, so `state_dict`, `save_pretrained`, adapters, hooks on the layer, copies and pickles are as before. The
subclass overrides `forward`:

    attention    `ProjectionBlock`: norm, QKV as one GEMM, norms of the heads, rotary embedding; then the model's own attention function
                 (`config._attn_implementation`) with its mask, cache and window; then the layer `o_proj`
    MLP          `MLPBlock`: residual, norm, gate and up as one GEMM, SwiGLU, down, residual

Each half is fused on its own, and decides so in every forward: a hook or an adapter inside a half, a linear layer that is not in FP8, or
autocast makes that half run the modules as they are. `why_not` returns the reasons, and `msamp.survey` prints them.

A model whose loss is transformers' `ForCausalLMLoss` gets `causal_lm_loss`, which makes no FP32 copy of the logits.

A family is a row of `FAMILIES`: the class names' prefix and what differs. A version of transformers whose forwards use other names than
`_KNOWN` is not recognized, and its layers stay as they are.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from msamp.nn.block import Norm
from msamp.nn.gemm import LayerGemm
from msamp.nn.linear import FP8Linear
from msamp.nn.mlp_block import MLPBlock, MLPSettings
from msamp.nn.projection_block import ProjectionBlock, ProjectionSettings
from msamp.nn.scaling_state import LinearScaling
from msamp.nn.vocabulary_loss import causal_lm_loss
from msamp.numerics.tensor import ScalingTensor


class Family(NamedTuple):
    """How the decoder layers of one kind of model differ from Llama's.

    Attributes:
        prefix: of its class names, such as LlamaDecoderLayer, LlamaAttention, LlamaMLP, LlamaRMSNorm.
        window: where the window of its attention is: "" (none), "config" or "attention".
        head_norms: whether queries and keys have norms, per head.
        optional_rope: whether a layer may have no rotary embedding (`use_rope`).
        experts: the class of its mixture of experts, which runs as it is; "" if it has an MLP in each layer.
    """

    prefix: str
    window: str = ""
    head_norms: bool = False
    optional_rope: bool = False
    experts: str = ""


FAMILIES = {  # folder in transformers.models -> family
    "llama": Family("Llama"),  # also SmolLM and SmolLM2
    "mistral": Family("Mistral", window="config"),
    "qwen2": Family("Qwen2", window="attention"),
    "qwen3": Family("Qwen3", window="attention", head_norms=True),
    "smollm3": Family("SmolLM3", window="attention", optional_rope=True),
}
_CACHES = ("cache", "past_key_values")  # the names of the cache of keys and values, since transformers 5.24 and before
_ARGUMENTS = {f"self hidden_states attention_mask position_ids {cache} use_cache position_embeddings kwargs" for cache in _CACHES}
_KNOWN = {  # part of a layer -> names that its forward may use
    "DecoderLayer": "input_layernorm self_attn post_attention_layernorm mlp",
    "Attention": "shape head_dim q_proj view transpose k_proj v_proj apply_rotary_pos_emb update layer_idx ALL_ATTENTION_FUNCTIONS "
    "get_interface config _attn_implementation eager_attention_forward training attention_dropout scaling reshape contiguous o_proj "
    "sliding_window getattr q_norm k_norm use_rope",
    "MLP": "down_proj act_fn gate_proj up_proj",
    "RMSNorm": "dtype to torch float32 pow mean rsqrt variance_epsilon weight",
}
_LOSS = ("transformers.loss.loss_utils", "ForCausalLMLoss")
_LOSS_ARGUMENTS = "logits labels vocab_size num_items_in_batch ignore_index shift_labels kwargs"
_SILU = ("SiLU", "SiLUActivation")
_MULTIPLE = 16  # rows of joined weights and their width, for the FP8 GEMMs
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _host(kind: type) -> type:
    """Return the class of a decoder layer before `fuse`."""
    return kind.__mro__[kind.__mro__.index(FusedDecoderLayer) + 1] if issubclass(kind, FusedDecoderLayer) else kind


@functools.cache
def _family(kind: Any) -> tuple[type, Family] | None:
    """Return the class of transformers that `kind` is or derives from, and its family; None if that is not a decoder layer known here."""
    for base in _host(kind).__mro__:
        package, _, folder = base.__module__.rpartition(".modeling_")
        family = FAMILIES.get(folder) if package == f"transformers.models.{folder}" else None
        if family is not None and base.__qualname__ == f"{family.prefix}DecoderLayer":
            return base, family
    return None


def _names(kind: type) -> set[str]:
    return set(inspect.unwrap(kind.forward).__code__.co_names)  # type: ignore[attr-defined]


@functools.cache
def _arguments(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(inspect.unwrap(kind.forward)).parameters)  # type: ignore[attr-defined]


@functools.cache
def _unknown(kind: type, base: type, parts: tuple[type, ...], prefix: str) -> str:
    """Return why a decoder layer of class `kind`, with parts of these classes, does not compute what `base` is known to compute."""
    if inspect.unwrap(kind.forward) is not inspect.unwrap(base.forward):  # type: ignore[attr-defined]
        return f"{kind.__name__} is a subclass of {base.__name__} with another forward"
    names = [f"{prefix}{part}" for part in ("Attention", "MLP", "RMSNorm", "RMSNorm")]
    for part, name in zip(parts, names, strict=True):
        if (part.__module__, part.__qualname__) != (base.__module__, name):
            return f"it contains {part.__name__} instead of {name}"
    if " ".join(_arguments(base)) not in _ARGUMENTS:
        return f"this version of transformers has another signature of {base.__name__}.forward"
    for each in (base, *parts):
        known = next(known for part, known in _KNOWN.items() if each.__name__.endswith(part))
        if not _names(each) <= set(known.split()):
            return f"this version of transformers has another {each.__name__}.forward"
    return ""


def unrecognized(layer: nn.Module) -> str | None:
    """Return why a decoder layer of transformers is not fused, "" if it is or can be, None if the module is no decoder layer known here."""
    kind: Any = type(layer)
    found = _family(kind)
    if found is None:
        return None
    base, family = found
    parts = (layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm)
    return _unknown(_host(kind), base, tuple(map(type, parts)), family.prefix)


def is_fused(layer: nn.Module) -> bool:
    """Whether `fuse` has changed the class of a layer."""
    return isinstance(layer, FusedDecoderLayer)


class FusedDecoderLayer(nn.Module):
    """Mixin in front of a decoder layer's class, with the fused forward."""

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the layer; arguments and result as in its own class."""
        passed = kwargs | dict(zip(_arguments(_host(type(self)))[2:], args, strict=False))
        tables, cache = passed.get("position_embeddings"), next((passed[name] for name in _CACHES if name in passed), None)
        together = not (
            tables is None
            or tables[0].requires_grad
            or torch.is_autocast_enabled(hidden_states.device.type)
            or (cache is not None and not torch.is_grad_enabled())  # generation, which would join weights to multiply one token
            or passed.get("output_attentions")
            or hidden_states.dtype not in _DTYPES
        )
        attention, mlp = (together and not why(self) for why in (why_not_attention, why_not_mlp))
        if not attention and not mlp:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return, misc]
        passed.setdefault("attention_mask", None)
        x = hidden_states.contiguous()
        if attention:
            x, delta = self._attention(x, passed)
        else:
            delta, _ = self.self_attn(hidden_states=self.input_layernorm(x), **passed)
        if mlp:
            return self._mlp(x, delta.contiguous())
        x = x + delta
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]

    def _attention(self, x: torch.Tensor, passed: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream [b, s, h], through which its gradient flows, and attention's update of it."""
        own, norm, kind = self.self_attn, self.input_layernorm, cast(Any, type(self))
        _, family = cast(tuple[type, Family], _family(kind))
        layers = joined_attention(self)
        norms = (own.q_norm.weight, None, own.k_norm.weight, None) if family.head_norms else ()
        cos, sin = (table.flatten(0, 1) for table in passed.pop("position_embeddings"))
        if family.optional_rope and not own.use_rope:
            cos = sin = cos.new_empty(x.shape[1], 0)
        heads, groups = (layer.out_features // own.head_dim for layer in layers[:2])
        gemm = _gemm(layers)
        settings = ProjectionSettings(Norm(norm.variance_epsilon, rms=True), gemm, heads, groups, cos, sin, len(norms))
        weights = (*norms, *(layer.weight for layer in layers))
        x, query, key, value = ProjectionBlock.apply(x, norm.weight, None, _bias(layers), settings, *weights)  # type: ignore[no-untyped-call]
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mask, caches = passed.pop("attention_mask"), {name: passed.pop(name) for name in _CACHES if name in passed}
        for name, cache in caches.items():
            if cache is not None:
                key, value = cache.update(key, value, own.layer_idx, **({"kwargs": passed} if name == "cache" else {}))
        if family.window:
            passed["sliding_window"] = getattr(own if family.window == "attention" else own.config, "sliding_window", None)
        dropout = own.attention_dropout if own.training else 0.0
        o, _ = _core(own)(own, query, key, value, mask, dropout=dropout, scaling=own.scaling, **passed)
        return x, own.o_proj(o.reshape(*x.shape[:-1], -1))

    def _mlp(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        norm, (gate, up), down = self.post_attention_layernorm, joined_mlp(self), self.mlp.down_proj
        gemms = _gemm((gate, up)), _gemm((down,))
        settings = MLPSettings(Norm(norm.variance_epsilon, rms=True), *gemms, "swiglu", recompute=False)
        weights = (norm.weight, None, gate.weight, _bias((gate, up)), down.weight, down.bias)
        return MLPBlock.apply(x, delta, *weights, settings, up.weight)  # type: ignore[no-any-return, no-untyped-call]

    def scalings_alike(self) -> list[list[LinearScaling]]:
        """Return the scalings of the layers that one GEMM joins, which must have equal histories (`ScalingState`)."""
        groups = (joined_attention(self), joined_mlp(self))
        return [[layer.scaling for layer in group] for group in groups if all(isinstance(layer, FP8Linear) for layer in group)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *rest = reduced
        return _new, (_host(type(self)),), *rest


def _new(host: type) -> Any:
    kind: Any = _fused(host)
    return kind.__new__(kind)


@functools.cache
def _fused(host: Any) -> type:
    """Return the subclass of a decoder layer's class that runs fused, with the name of its base, which hosts look for."""
    return type(host.__name__, (FusedDecoderLayer, host), {"__module__": host.__module__, "__qualname__": host.__qualname__})


def fuse(model: nn.Module) -> list[nn.Module]:
    """Let the decoder layers of a model that are recognized run fused where their parts are in FP8; return them.

    The layers of a group that one GEMM joins get common scales of their casts, see `ScalingState`.
    """
    layers = [module for module in model.modules() if not is_fused(module) and unrecognized(module) == ""]
    for layer in layers:
        host: type = type(layer)
        layer.__class__ = _fused(host)
    models: Any = model.modules() if layers else ()
    for each in models:
        loss: Any = each.loss_function if getattr(each, "loss_type", None) == "ForCausalLM" else None
        known = (getattr(loss, "__module__", ""), getattr(loss, "__qualname__", "")) == _LOSS
        if known and " ".join(inspect.signature(loss).parameters) == _LOSS_ARGUMENTS:
            each.loss_function = causal_lm_loss
    return layers


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`."""
    for module in model.modules():
        if is_fused(module):
            module.__class__ = _host(type(module))
        if vars(module).get("_loss_function") is causal_lm_loss:
            del module._loss_function


def joined_attention(layer: nn.Module) -> tuple[Any, ...]:
    """Return the layers that one GEMM joins in the attention of a decoder layer."""
    own: Any = layer.self_attn
    return own.q_proj, own.k_proj, own.v_proj


def joined_mlp(layer: nn.Module) -> tuple[Any, ...]:
    """Return the layers that one GEMM joins in the MLP of a decoder layer."""
    mlp: Any = layer.mlp
    return mlp.gate_proj, mlp.up_proj


def _gemm(layers: Sequence[Any]) -> LayerGemm:
    """Return the current scales of layers that read one input, as those of one GEMM; the slots are the first layer's."""
    first, *more = layers
    return LayerGemm.of(first.scaling, first.weight)._replace(more=tuple(layer.scaling.weight_scales(layer.weight) for layer in more))


def _bias(layers: Sequence[Any]) -> torch.Tensor | None:
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return torch.cat(biases) if biases else None


def _core(attention: nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Return the attention function that the model's configuration selects."""
    module = sys.modules[type(attention).__module__]
    functions = module.ALL_ATTENTION_FUNCTIONS
    name, eager = attention.config._attn_implementation, module.eager_attention_forward  # type: ignore[union-attr]
    return functions.get_interface(name, eager)  # type: ignore[no-any-return]


def why_not_attention(layer: nn.Module, converted: "set[int] | None" = None) -> str:
    """Return why the attention of a recognized decoder layer does not run fused; "" if it does. `converted`: ids of linear layers that are
    not in FP8 yet but will be."""
    own: Any = layer.self_attn
    norms = (own.q_norm, own.k_norm) if hasattr(own, "q_norm") else ()
    return _why_called(own, layer.input_layernorm, *norms) or _why_apart(joined_attention(layer), (), converted)  # type: ignore[arg-type]


def why_not_mlp(layer: nn.Module, converted: "set[int] | None" = None) -> str:
    """Like `why_not_attention`, of the MLP."""
    mlp: Any = layer.mlp
    if type(mlp.act_fn).__name__ not in _SILU:
        return "its activation is not SiLU"
    return _why_called(mlp, mlp.act_fn, layer.post_attention_layernorm) or _why_apart(joined_mlp(layer), (mlp.down_proj,), converted)  # type: ignore[arg-type]


def _why_called(*modules: nn.Module) -> str:
    """Return why modules must be called, rather than only their parameters used."""
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return "a module inside it has a hook"
        if "forward" in vars(module):
            return "the forward of a module inside it was replaced"
    return ""


def _why_apart(joined: Iterable[nn.Module], single: Iterable[nn.Module], converted: "set[int] | None") -> str:
    """Return why linear layers cannot be used by fused functions, of which the `joined` read one input."""
    joined = tuple(joined)
    biases = 0
    for number, layer in enumerate((*joined, *single)):
        if converted is None or id(layer) not in converted:
            if not isinstance(layer, FP8Linear):
                return "a linear layer inside it is not in FP8"
            weight = layer._parameters.get("weight")
            if not isinstance(getattr(weight, "_local_tensor", weight), ScalingTensor):  # between gathers, FSDP2's is a DTensor
                return "the weight of a layer inside it is not in FP8"
            scaling = layer.scaling
            if scaling.raised:
                return "the precision guard has raised a layer inside it to BF16"
            if not scaling.fusible:
                return "its casts do not have one power-of-two scale per tensor"
            if 0 < number < len(joined) and (scaling.watches or scaling.checks or scaling.sums):
                return "casts of a layer inside it are measured"
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return "a linear layer inside it has a hook"
        if "forward" in vars(layer):
            return "the forward of a linear layer inside it was replaced"
        if number < len(joined):
            if layer.out_features % _MULTIPLE or layer.in_features % _MULTIPLE:  # type: ignore[operator]
                return f"the shape of a layer inside it is not a multiple of {_MULTIPLE}"
            biases += layer._parameters.get("bias") is not None
    return "" if biases in (0, len(joined)) else "some of the layers that one GEMM would join have a bias"
