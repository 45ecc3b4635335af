"""Conversion of any module tree: the linear layers that a filter accepts become FP8Linear, everything else stays as it is."""

from collections import Counter

from torch import nn

from msamp.nn.filters import DEFAULT, Filter
from msamp.nn.linear import FP8Linear
from msamp.numerics.recipe import Recipe


def convert(model: nn.Module, recipe: Recipe, accept: Filter = DEFAULT) -> nn.Module:
    """Replace linear layers by FP8Linear, in place.

    Only plain `torch.nn.Linear` is replaced: a subclass may read its weight in its own way. A weight that two modules
    share (an LM head tied to its embedding) stays as it is, because the other module could not read it.

    Args:
        model: any module tree. Where it is itself an accepted Linear, the converted layer is returned.
        recipe: with FP8 GEMMs; any other leaves the model as it is.
        accept: predicate over (dotted name, layer), see `msamp.nn.filters`.

    Returns:
        The model.

    Raises:
        ValueError: naming the layer whose weight holds NaN or infinity; nothing has been replaced then.
    """
    if recipe.gemm is None:
        return model
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    replacements: dict[nn.Module, FP8Linear] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and owners[id(module.weight)] == 1 and accept(name, module):
            replacements[module] = FP8Linear.from_linear(module, recipe, f"{name}.weight" if name else "weight")
    for module in list(model.modules()):
        for child_name, child in list(module._modules.items()):  # named_children would pass over a layer used twice
            if child in replacements:
                setattr(module, child_name, replacements[child])
    return replacements.get(model, model)
