"""Decoder layers of transformers that run as the trainer's layers do, with their parameters, names, hooks and attention.

`fuse` recognizes a layer by its class and by the names that its forward uses, and changes the class of the object to a subclass of its own
class: nothing is added or moved, so `state_dict`, `save_pretrained`, adapters, hooks on the layer, copies and pickles are as before. The
subclass overrides `forward`:

    attention    `ProjectionBlock`: norm, QKV as one GEMM, norms of the heads, rotary embedding; then the model's own attention function
                 (`config._attn_implementation`) with its mask, cache and window; then the layer `o_proj`
    MLP          `MLPBlock`: residual, norm, gate and up as one GEMM, SwiGLU, down, residual

Each half is fused on its own, and decides so in every forward: a hook or an adapter inside a half, or a linear layer that is not in FP8,
makes that half run its modules as they are; `msamp.survey` prints why. Experts run as they are (`msamp.nn.experts`); generation is unfused.

The other RMSNorms of the model, OLMo2's and GPT-2's GELU become one kernel each, and such a model whose loss is transformers'
`ForCausalLMLoss` gets `causal_lm_loss`, which makes no FP32 copy of the logits. Under autocast, GEMMs have results in its dtype, and the
stream keeps its own.

`msamp.nn.decoder_families` is the table of what is known.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from msamp.nn.block import Norm, hooks_of, wait_for_weights
from msamp.nn.decoder_families import CACHES, Family, arguments_of, family_of, host_of, known_alone, unrecognized
from msamp.nn.gemm import LayerGemm
from msamp.nn.layer_gains import MLP
from msamp.nn.linear import FP8Linear
from msamp.nn.linear_fn import LinearFunction, LinearSettings, checked_label
from msamp.nn.mlp_block import MLPBlock, MLPSettings
from msamp.nn.projection_block import ProjectionBlock, ProjectionSettings
from msamp.nn.saved_activations import AS_IT_IS
from msamp.nn.scaling_state import LinearScaling
from msamp.nn.unfused import NormFunction
from msamp.nn.vocabulary_loss import causal_lm_loss
from msamp.numerics.tensor import ScalingTensor

_LOSS = ("transformers.loss.loss_utils", "ForCausalLMLoss")
_LOSS_ARGUMENTS = "logits labels vocab_size num_items_in_batch ignore_index shift_labels kwargs"
_SILU = ("SiLU", "SiLUActivation")
_MULTIPLE = 16  # rows of joined weights and their width, for the FP8 GEMMs
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Fused(nn.Module):
    """Mixin in front of a class of transformers, with a fused forward; copies and pickles keep it."""

    fused_host: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *rest = reduced
        return _new, (next(kind for kind in _MIXINS if isinstance(self, kind)), host_of(type(self))), *rest


class FusedNorm(_Fused):
    """An RMSNorm of transformers by one kernel, which does not round the normalized values before it multiplies them by the weight."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != self.weight.dtype or hidden_states.dtype not in _DTYPES:
            return super().forward(hidden_states)  # type: ignore[no-any-return, misc]
        return NormFunction.apply(hidden_states, self.weight, None, self.variance_epsilon, True, AS_IT_IS)  # type: ignore[no-any-return]


class FusedGELU(_Fused):
    """transformers' GELU in tanh form, by one kernel in place of eight, rounded once; under autocast, where some are FP32, as it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        autocast = torch.is_autocast_enabled(x.device.type)
        return super().forward(x) if autocast else functional.gelu(x, approximate="tanh")  # type: ignore[no-any-return, misc]


class FusedDecoderLayer(_Fused):
    """A decoder layer of transformers whose halves are fused functions."""

    family: Family  # of the class, as functions that are cached make torch.compile warn
    arguments: tuple[str, ...]  # of the class's forward after the hidden states
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the layer; arguments and result as in its own class."""
        passed = kwargs | dict(zip(self.arguments, args, strict=False))
        tables, cache = passed.get("position_embeddings"), next((passed[name] for name in CACHES if name in passed), None)
        together = not (
            tables is None
            or tables[0].requires_grad
            or (cache is not None and not torch.is_grad_enabled())  # generation, which would join weights to multiply one token
            or passed.get("output_attentions")
            or hidden_states.dtype not in _DTYPES
        )
        attention, mlp = (together and not why(self) for why in (why_not_attention, why_not_mlp))
        if not attention and not mlp:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return, misc]
        wait_for_weights(self)
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
        own, norm, family = self.self_attn, self.input_layernorm, self.family
        layers = joined_attention(self)
        norms = (own.q_norm.weight, None, own.k_norm.weight, None) if family.head_norms else ()
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        cos, sin = (table.flatten(0, 1) for table in passed.pop("position_embeddings"))
        if family.optional_rope and not own.use_rope:
            cos = sin = cos.new_empty(x.shape[1], 0)
        heads, groups = (layer.out_features // own.head_dim for layer in layers[:2])
        gemm = _gemm(layers, x)
        settings = ProjectionSettings(
            Norm(norm.variance_epsilon, rms=True), gemm, heads, groups, cos, sin, dtype, len(norms), family.head_norms == "all"
        )
        weights = (*norms, *(layer.weight for layer in layers))
        x, query, key, value = ProjectionBlock.apply(x, norm.weight, None, _bias(layers), settings, *weights)  # type: ignore[no-untyped-call]
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mask, caches = passed.pop("attention_mask"), {name: passed.pop(name) for name in CACHES if name in passed}
        for name, cache in caches.items():
            if cache is not None:
                key, value = cache.update(key, value, own.layer_idx, **({"kwargs": passed} if name == "cache" else {}))
        if family.window:
            passed["sliding_window"] = getattr(own if family.window == "attention" else own.config, "sliding_window", None)
        dropout = own.attention_dropout if own.training else 0.0
        o, _ = _core(own)(own, query, key, value, mask, dropout=dropout, scaling=own.scaling, **passed)
        o = o.reshape(*x.shape[:-1], -1)
        if _why_apart((), (own.o_proj,), None):
            return x, own.o_proj(o)
        gemm, label = _gemm((own.o_proj,), o), checked_label(own.o_proj.weight, o)
        settings_of_o = LinearSettings(gemm, label=label, cast_again=not gemm.in_bf16)  # attention saves `o` too
        return x, LinearFunction.apply(o, own.o_proj.weight, own.o_proj.bias, settings_of_o)  # type: ignore[no-untyped-call]

    def _mlp(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        norm, (gate, up), down = self.post_attention_layernorm, joined_mlp(self), self.mlp.down_proj
        gemms = _gemm((gate, up), x), _gemm((down,), x)
        settings = MLPSettings(Norm(norm.variance_epsilon, rms=True), *gemms, "swiglu", recompute=False)
        weights = (norm.weight, None, gate.weight, _bias((gate, up)), down.weight, down.bias)
        return MLPBlock.apply(x, delta, *weights, settings, up.weight)  # type: ignore[no-any-return, no-untyped-call]

    def weight_holders(self) -> tuple[nn.Module, ...]:
        """Return the modules whose weights this layer's own forward uses (`ZeRO.watch_forward`)."""
        return (self,)

    def scalings_alike(self) -> list[tuple[str, list[tuple[LinearScaling, ...]]]]:
        """Return for each half the scalings of its layers in FP8, those that one GEMM joins together (`ScalingState`)."""
        halves = {"attention": (joined_attention(self), (self.self_attn.o_proj,))}
        halves |= {MLP: (joined_mlp(self), (self.mlp.down_proj,))} if hasattr(self.mlp, "down_proj") else {}
        low = {kind: [group for group in half if all(isinstance(layer, FP8Linear) for layer in group)] for kind, half in halves.items()}
        return [(kind, [tuple(layer.scaling for layer in group) for group in half]) for kind, half in low.items() if half]


_MIXINS = (FusedDecoderLayer, FusedNorm, FusedGELU)


def _new(mixin: type, host: type) -> Any:
    kind: Any = _fused(mixin, host)
    return kind.__new__(kind)


@functools.cache
def _fused(mixin: Any, host: Any) -> type:
    """Return the subclass of a class of transformers that runs fused, with the name of its base, which hosts look for."""
    names: dict[str, Any] = {"__module__": host.__module__, "__qualname__": host.__qualname__, "fused_host": host}
    if mixin is FusedDecoderLayer:
        names |= {"family": family_of(host)[1], "arguments": arguments_of(host)[2:]}  # type: ignore[index]
    return type(host.__name__, (mixin, host), names)


def fuse(model: nn.Module) -> list[nn.Module]:
    """Let the decoder layers of a model that are recognized run fused where their parts are in FP8; return them.

    The layers of a group that one GEMM joins get common scales of their casts, see `ScalingState`.
    """
    layers = [module for module in model.modules() if not isinstance(module, FusedDecoderLayer) and unrecognized(module) == ""]
    norms = {host_of(type(layer.input_layernorm)) for layer in layers}
    for module in model.modules():
        host: Any = type(module)
        if host in norms or known_alone(host):
            module.__class__ = _fused(FusedNorm if hasattr(module, "variance_epsilon") else FusedGELU, host)
    for layer in layers:
        host = type(layer)
        layer.__class__ = _fused(FusedDecoderLayer, host)
    models: Any = model.modules() if any(isinstance(module, _Fused) for module in model.modules()) else ()
    for each in filter(computes_known_loss, models):
        each._loss_function = causal_lm_loss  # what the property of transformers returns, which a subclass may have made read-only
    return layers


def computes_known_loss(model: nn.Module) -> bool:
    """Whether a model computes its loss by transformers' `ForCausalLMLoss`, which `causal_lm_loss` can replace: `forward` asks for it."""
    causal = getattr(model, "loss_type", "") in ("ForCausalLM", None) and hasattr(model, "lm_head")  # None: of GPT-2, by default the same
    forwards = (inspect.unwrap(vars(base)["forward"]) for base in type(model).__mro__ if "forward" in vars(base))
    asked: Any = causal and any("loss_function" in getattr(getattr(each, "__code__", None), "co_names", ()) for each in forwards)
    loss: Any = getattr(model, "loss_function", None) if asked else None
    known = (getattr(loss, "__module__", ""), getattr(loss, "__qualname__", "")) == _LOSS
    return known and " ".join(inspect.signature(loss).parameters) == _LOSS_ARGUMENTS


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`."""
    for module in model.modules():
        if isinstance(module, _Fused):
            module.__class__ = host_of(type(module))
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


def _gemm(layers: Sequence[Any], x: torch.Tensor) -> LayerGemm:
    """Return the current scales of layers that read one input with as many rows as `x`, as those of one GEMM; the slots are the first's."""
    for layer in layers:
        if layer.scaling.shape is None:
            layer.scaling.note(x, layer.weight)
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
    if getattr(own.config, "clip_qkv", None) is not None:
        return "its queries, keys and values are clipped"
    if any(norm.variance_epsilon != layer.input_layernorm.variance_epsilon for norm in norms):  # type: ignore[union-attr]
        return "its norms have different epsilons"
    return _why_called(own, layer.input_layernorm, *norms) or _why_apart(joined_attention(layer), (), converted)  # type: ignore[arg-type]


def why_not_mlp(layer: nn.Module, converted: "set[int] | None" = None) -> str:
    """Like `why_not_attention`, of the MLP."""
    mlp: Any = layer.mlp
    if not hasattr(mlp, "down_proj"):
        return "its experts run as they are"
    if type(mlp.act_fn).__name__ not in _SILU:
        return "its activation is not SiLU"
    return _why_called(mlp, mlp.act_fn, layer.post_attention_layernorm) or _why_apart(joined_mlp(layer), (mlp.down_proj,), converted)  # type: ignore[arg-type]


def _why_called(*modules: nn.Module) -> str:
    """Return why modules must be called, rather than only their parameters used."""
    for module in modules:
        if not all(map(_is_idle, hooks_of(module))):
            return "a module inside it has a hook"
        if "forward" in vars(module):
            return "the forward of a module inside it was replaced"
    return ""


def _is_idle(hook: Callable[..., Any]) -> bool:
    """Whether a hook is transformers' for attention weights, which stays after a forward that returned hidden states, and is not in use."""
    if not getattr(hook, "__qualname__", "").endswith("output_capturing_hook"):
        return False
    asked = sys.modules[hook.__module__]._active_collector.get()
    return asked is None or "attentions" not in asked


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
            if bool(scaling.in_bf16) != bool(joined[0].scaling.in_bf16 if joined else scaling.in_bf16):  # type: ignore[union-attr]
                return "one product inside it computes in BF16"
            if 0 < number < len(joined) and (scaling.watches or scaling.checks or scaling.sums):
                return "casts of a layer inside it are measured"
        if hooks_of(layer):
            return "a linear layer inside it has a hook"
        if "forward" in vars(layer):
            return "the forward of a linear layer inside it was replaced"
        if number < len(joined):
            if layer.out_features % _MULTIPLE or layer.in_features % _MULTIPLE:  # type: ignore[operator]
                return f"the shape of a layer inside it is not a multiple of {_MULTIPLE}"
            biases += layer._parameters.get("bias") is not None
    return "" if biases in (0, len(joined)) else "some of the layers that one GEMM would join have a bias"
