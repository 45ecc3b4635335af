"""Levels with delayed scaling over 4 steps instead of 16: a test that must pass both of its phases needs a quarter of the steps."""

from collections.abc import Mapping

from msamp.numerics.recipe import Recipe, by_name
from msamp.numerics.scaling import Delayed

WINDOW = 4


def short(level: str, settings: Mapping[str, str]) -> Recipe | str:
    """Return the level with delayed scaling over `WINDOW` steps; its name where `settings` or the level itself choose another rule."""
    recipe = by_name(level)
    delayed = recipe.gemm is not None and isinstance(recipe.gemm.input.scaling, Delayed)
    return recipe.with_scaling(Delayed(WINDOW)) if delayed and "fp8_recipe" not in settings else level
