"""Recipes in a sentence."""

import pytest

from msamp.numerics import recipe
from msamp.numerics.recipe_words import describe

O3 = (
    "GEMMs in FP8, activations in bf16; weight fp8-e4m3, master weight fp16; gradient fp8-e4m3; moments fp8-e4m3 and fp16, masters rounded "
    "stochastically"
)
PLUS = "GEMMs and activations in bf16; weight bf16, which is its own master; gradient bf16; moments bf16 and bf16, Collage's update plus"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("O0", "GEMMs and activations in bf16; weight bf16, master weight fp32; gradient fp32; moments fp32 and fp32"),
        ("O2", O3.replace("weight fp8-e4m3, master weight fp16", "weight fp16, which is its own master")),
        ("O3", O3),
        ("collage-plus", PLUS),
    ],
)
def test_a_recipe_in_words(name: str, words: str) -> None:
    assert describe(recipe.by_name(name)) == words


@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_can_be_described(name: str) -> None:
    assert describe(recipe.by_name(name)).startswith("GEMMs")
