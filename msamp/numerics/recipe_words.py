"""Describe a recipe in one sentence, from its fields, for reports and pages."""

from msamp.numerics.recipe import Recipe


def describe(recipe: Recipe) -> str:
    """Return what a recipe does to a linear layer and its optimizer states, with formats by the names of the flags."""
    states = recipe.states
    gemm = f"GEMMs in FP8, activations in {recipe.compute.name}" if recipe.fp8 else f"GEMMs and activations in {recipe.compute.name}"
    own = states.update != "fp32" or recipe.weight == states.master
    master = "which is its own master" if own else f"master weight {states.master.name}"
    moments = f"moments {states.m.name} and {states.v.name}"
    update = "" if states.update == "fp32" else f", Collage's update {states.update}"
    rounded = "" if states.master_rounding == "nearest" else ", masters rounded stochastically"
    return f"{gemm}; weight {recipe.weight.name}, {master}; gradient {states.grad.name}; {moments}{update}{rounded}"
