"""Which linear layers of a model are converted, by name and shape, and which of them are behind a SwiGLU."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import nn

from msamp.nn.cast_checks import check_smooth
from msamp.nn.linear import FP8Linear
from msamp.nn.transformer_block import TransformerBlock
from msamp.numerics.recipe import Recipe
from msamp.numerics.stochastic_rounding import unwrapped

Filter = Callable[[str, nn.Linear], bool]


@dataclass(frozen=True)
class Named:
    """A filter with a reason for what it rejects."""

    accepts: Filter
    why: str

    def __call__(self, name: str, layer: nn.Linear) -> bool:
        return self.accepts(name, layer)


@dataclass(frozen=True)
class Every:
    """Accepts a layer if all of its filters do."""

    filters: tuple[Filter, ...]

    def __call__(self, name: str, layer: nn.Linear) -> bool:
        return all(f(name, layer) for f in self.filters)


def why_refused(accept: Filter, name: str, layer: nn.Linear) -> str:
    """Return why a filter rejects a layer; "" if it accepts it."""
    if isinstance(accept, Every):
        return next((why for f in accept.filters if (why := why_refused(f, name, layer))), "")
    if accept(name, layer):
        return ""
    return accept.why if isinstance(accept, Named) else "accept= leaves it out"


def exclude_names(*patterns: str) -> Filter:
    """Reject layers whose dotted name contains a match of any of the regular expressions."""
    compiled = [re.compile(p) for p in patterns]
    return Named(lambda name, layer: not any(p.search(unwrapped(name)) for p in compiled), "its name is excluded")


def include_names(*patterns: str) -> Filter:
    """Accept only layers whose dotted name contains a match of any of the regular expressions."""
    refuse = exclude_names(*patterns)
    return Named(lambda name, layer: not refuse(name, layer), "its name is not included")


def min_features(size: int) -> Filter:
    """Accept layers with at least `size` input and output features: narrower GEMMs gain nothing and are mostly padding."""
    return Named(lambda name, layer: min(layer.in_features, layer.out_features) >= size, f"it has fewer than {size} features")


def all_of(*filters: Filter) -> Filter:
    """Accept a layer if every filter does."""
    return Every(filters)


# The LM head stays in 16 bits: its gradient has the widest range and its logits are the most sensitive. Adapters (`lora_A`, `lora_B`) do
# too: they are small, and their library saves and merges them itself.
_PEFT = r"(\.base_layer|\.original_module|\.modules_to_save\.[^.]+)?"  # what it names a layer that it adapts or copies
DEFAULT: Filter = all_of(exclude_names(rf"(^|\.)(lm_head|output_layer|embed_out){_PEFT}$", r"(^|\.)lora_"), min_features(16))


_SILU = ("SiLU", "SiLUActivation")  # torch's and transformers'
_BEFORE = (("gate_proj", "up_proj"), ("gate_up_proj",))  # Llama, Qwen and Mistral; Phi-3


def _behind(module: nn.Module) -> nn.Module | None:
    """Return the linear layer behind the SwiGLU that `module` computes; None if it computes none that is known here."""
    if isinstance(module, TransformerBlock):
        return module.fc2 if module.activation == "swiglu" else None
    own: Callable[[str], nn.Module | None] = dict(module.named_children()).get
    function = own("act_fn") or own("activation_fn")
    known = any(all(isinstance(own(name), nn.Linear) for name in names) for names in _BEFORE)
    return own("down_proj") if known and type(function).__name__ in _SILU else None


def behind_swiglu(model: nn.Module, recipe: Recipe, converted: Collection[nn.Module]) -> list[nn.Linear]:
    """Return the linear layers behind a SwiGLU that are in FP8 or will be.

    Known are `msamp.TransformerBlock` and modules with children `gate_proj` and `up_proj`, or `gate_up_proj`, a SiLU, and `down_proj`, as
    in transformers' Llama, Qwen, Mistral and Phi-3.

    Raises:
        ValueError: if there is none, or the recipe's casts do not support channel scales.
    """
    if recipe.gemm is None:
        raise ValueError(f"smooth_swiglu=True applies to FP8 linear layers, and recipe {recipe.name!r} has none; use O1, O2 or O3")
    check_smooth(recipe.gemm)
    layers = [layer for module in model.modules() if isinstance(layer := _behind(module), nn.Linear)]
    low = [layer for layer in layers if layer in converted or isinstance(layer, FP8Linear)]
    if not low:
        why = f"{len(layers)} found, none of them in FP8: widen `accept`" if layers else "none found"
        raise ValueError(
            "smooth_swiglu=True requires a SwiGLU that is known, msamp.TransformerBlock or children gate_proj, up_proj, act_fn and "
            f"down_proj ({why}); leave it out, or build the model from these"
        )
    return low
