"""Which decoder layers of transformers `msamp.nn.decoder_layer` can run fused: a table of families, and the recognition of their classes.

A layer is recognized by its class, the classes of its parts, and the names that their forwards use. A version of transformers whose
forwards have other arguments, or use other names than `_KNOWN`, computes something that is not known here: its layers stay as they are.
"""

import functools
import inspect
from typing import Any, NamedTuple

from torch import nn


class Family(NamedTuple):
    """How the decoder layers of one kind of model differ from Llama's.

    Attributes:
        prefix: of its class names, such as LlamaDecoderLayer, LlamaAttention, LlamaMLP, LlamaRMSNorm.
        window: where the window of its attention is: "" (none), "config" or "attention".
        head_norms: whether queries and keys have norms: "" (none), "head" (over each head) or "all" (over all heads of a token).
        optional_rope: whether a layer may have no rotary embedding (`use_rope`).
    """

    prefix: str
    window: str = ""
    head_norms: str = ""
    optional_rope: bool = False


FAMILIES = {  # folder in transformers.models -> family
    "llama": Family("Llama"),  # also SmolLM and SmolLM2
    "mistral": Family("Mistral", window="config"),
    "mixtral": Family("Mixtral", window="config"),
    "olmoe": Family("Olmoe", window="config", head_norms="all"),
    "qwen2": Family("Qwen2", window="attention"),
    "qwen3": Family("Qwen3", window="attention", head_norms="head"),
    "qwen3_moe": Family("Qwen3Moe", window="attention", head_norms="head"),
    "smollm3": Family("SmolLM3", window="attention", optional_rope=True),
}
_UNFUSED = {  # class of a layer -> why no layer of its kind is fused; further ones of transformers have no such function
    "GPT2Block": "GPT-2's layers (one projection for QKV, dropout) have no fused functions here",
    "Olmo2DecoderLayer": "OLMo2's norms follow the attention and the MLP, and the fused functions begin with a norm",
    "TransformerEncoderLayer": "torch's layers (attention in one module, dropout, norms before or after) have no fused functions here",
}
CACHES = ("cache", "past_key_values")  # the names of the cache of keys and values, since transformers 5.24 and before
_ARGUMENTS = {
    arguments
    for cache in CACHES
    for arguments in (
        f"self hidden_states attention_mask position_ids {cache} use_cache position_embeddings kwargs",
        f"self hidden_states position_embeddings attention_mask position_ids {cache} kwargs",
    )
}
_KNOWN = {  # part of a layer -> names that its forward may use; a mixture of experts runs as it is
    "DecoderLayer": "input_layernorm self_attn post_attention_layernorm mlp",
    "Attention": "shape head_dim q_proj view transpose k_proj v_proj apply_rotary_pos_emb update layer_idx ALL_ATTENTION_FUNCTIONS "
    "get_interface config _attn_implementation eager_attention_forward training attention_dropout scaling reshape contiguous o_proj "
    "sliding_window getattr q_norm k_norm use_rope clip_qkv clamp_",
    "MLP": "down_proj act_fn gate_proj up_proj",
    "RMSNorm": "dtype to torch float32 pow mean rsqrt variance_epsilon weight",
}
_ALONE = {  # parts of layers that are not fused, of which one kernel computes each -> names that its forward may use
    "transformers.activations.NewGELUActivation": "torch tanh math sqrt pi pow",
    "transformers.models.olmo2.modeling_olmo2.Olmo2RMSNorm": _KNOWN["RMSNorm"],
}
_PARTS = (("Attention",), ("MLP", "SparseMoeBlock"), ("RMSNorm",), ("RMSNorm",))


def host_of(kind: type) -> type:
    """Return the class of transformers of which `kind` is the fused subclass; `kind` itself if it is none."""
    return getattr(kind, "fused_host", kind)


@functools.cache
def family_of(kind: Any) -> tuple[type, Family] | None:
    """Return the class of transformers that `kind` is or derives from, and its family; None if that is not a decoder layer known here."""
    for base in host_of(kind).__mro__:
        package, _, folder = base.__module__.rpartition(".modeling_")
        family = FAMILIES.get(folder) if package == f"transformers.models.{folder}" else None
        if family is not None and base.__qualname__ == f"{family.prefix}DecoderLayer":
            return base, family
    return None


def known_alone(kind: Any) -> bool:
    """Whether a class of transformers is a part of layers that are not fused, which one kernel computes."""
    known = _ALONE.get(f"{kind.__module__}.{kind.__qualname__}")
    return known is not None and set(inspect.unwrap(kind.forward).__code__.co_names) <= set(known.split())


@functools.cache
def arguments_of(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(inspect.unwrap(kind.forward)).parameters)  # type: ignore[attr-defined]


@functools.cache
def _unknown(kind: type, base: type, parts: tuple[type, ...], prefix: str) -> str:
    """Return why a decoder layer of class `kind`, with parts of these classes, does not compute what `base` is known to compute."""
    if inspect.unwrap(kind.forward) is not inspect.unwrap(base.forward):  # type: ignore[attr-defined]
        return f"{kind.__name__} is a subclass of {base.__name__} with another forward"
    for part, kinds in zip(parts, _PARTS, strict=True):
        if part.__module__ != base.__module__ or part.__qualname__ not in {f"{prefix}{kind}" for kind in kinds}:
            return f"it contains {part.__name__} instead of {prefix}{kinds[0]}"
    if " ".join(arguments_of(base)) not in _ARGUMENTS:
        return f"this version of transformers has another signature of {base.__name__}.forward"
    for each in (base, *parts):
        known = next((known for part, known in _KNOWN.items() if each.__name__.endswith(part)), None)
        if known is not None and not set(inspect.unwrap(each.forward).__code__.co_names) <= set(known.split()):  # type: ignore[attr-defined]
            return f"this version of transformers has another {each.__name__}.forward"
    return ""


def unrecognized(layer: nn.Module) -> str | None:
    """Return why a layer of a transformer is not fused, "" if it is or can be, None if the module is not such a layer: a decoder layer of
    transformers, or one of `_UNFUSED`."""
    kind: Any = type(layer)
    found = family_of(kind)
    if found is None:
        package, name = kind.__module__.split(".")[:2], kind.__qualname__
        known = _UNFUSED.get(name, "its family has no fused functions here" if name.endswith("DecoderLayer") else None)
        return known if package in (["transformers", "models"], ["torch", "nn"]) else None
    base, family = found
    parts: tuple[Any, ...] = (layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm)
    return _unknown(host_of(kind), base, tuple(host_of(type(part)) for part in parts), family.prefix)
