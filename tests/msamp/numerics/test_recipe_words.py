"""Recipes in a sentence."""

import pytest

from msamp.numerics import recipe
from msamp.numerics.recipe_words import describe


@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_can_be_described(name: str) -> None:
    assert describe(recipe.by_name(name)).startswith("GEMMs")
