"""Find the linear layers behind a SwiGLU in a model, whose inputs can have scales per channel (`msamp.nn.channel_scales`)."""

from collections.abc import Callable, Collection

from torch import nn

from msamp.nn.cast_checks import check_smooth
from msamp.nn.linear import FP8Linear
from msamp.nn.transformer_block import TransformerBlock
from msamp.numerics.recipe import Recipe

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

    Args:
        model: any module tree.
        recipe: of the conversion.
        converted: layers that will be converted.

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
