"""Conversion of any module tree: the linear layers that a filter accepts become FP8Linear, everything else stays as it is."""

from collections import Counter

from torch import nn

from msamp.nn.filters import DEFAULT, Filter
from msamp.nn.linear import FP8Linear, check_finite
from msamp.numerics.recipe import Recipe


def convert(model: nn.Module, recipe: Recipe, accept: Filter = DEFAULT) -> nn.Module:
    """Turn linear layers into FP8Linear, in place: a converted layer is the same object, with its hooks.

    Only a plain `torch.nn.Linear` is converted: a subclass may read its weight in its own way. A weight that two modules
    share (an LM head tied to its embedding) stays as it is, because the other module could not read it.

    Args:
        model: any module tree, or itself a Linear.
        recipe: with FP8 GEMMs; any other leaves the model as it is.
        accept: predicate over (dotted name, layer), see `msamp.nn.filters`.

    Returns:
        The model.

    Raises:
        ValueError: naming the layer whose weight holds NaN or infinity; nothing has been converted then.
    """
    if recipe.gemm is None:
        return model
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    chosen = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and owners[id(module.weight)] == 1 and accept(name, module)
    }
    for name, module in chosen.items():
        check_finite(module.weight, f"{name}.weight" if name else "weight")
    for module in chosen.values():
        layer = FP8Linear.from_linear(module, recipe)
        # The object stays, so that hooks on it and other references to it go on working; only what it is changes.
        module.__class__ = FP8Linear  # type: ignore[assignment]
        module.weight = layer.weight
        module.add_module("scaling", layer.scaling)
    for parent in model.modules():
        if isinstance(parent, nn.TransformerEncoderLayer) and isinstance(parent.linear1, FP8Linear):
            parent.activation_relu_or_gelu = 0  # torch's fused inference path would read linear1.weight as a plain tensor
    return model
