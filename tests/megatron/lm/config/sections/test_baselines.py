"""The peers' recipes: what each tells megatron-core, and that all else is O0's."""

from dataclasses import fields

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.lm.config import PrecisionConfig
from megatron.lm.config.sections import baselines
from megatron.lm.config.sections.precision import recipe_names
from msamp.numerics import recipe
from msamp.numerics.recipe import BF16

CORE = {
    "te-bf16": {},
    "te-delayed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_margin": 0,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
    },
    "te-current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "te-block": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}


def test_each_recipe_is_told_to_megatron_core_in_its_own_words():
    assert baselines.names() == tuple(CORE)
    known = {field.name for field in fields(TransformerConfig)}
    for name, core in CORE.items():
        found = baselines.find(name)
        assert found is not None
        assert dict(found.core) == core
        assert core.keys() <= known
        assert found.keeps_history == (core.get("fp8_recipe") == "delayed")
    assert baselines.find("O3") is None


@pytest.mark.parametrize("name", CORE)
def test_states_and_gradients_are_those_of_o0(name: str):
    found = PrecisionConfig(precision=name).recipe  # by the trainer's own way, formats looked at
    assert isinstance(found, baselines.PeerRecipe)
    kept = ("compute", "gemm", "weight", "states", "vectors", "fp8_wire", "shards_optimizer", "accumulator", "activations")
    assert all(getattr(found, fact) == getattr(BF16, fact) for fact in kept)
    assert found != BF16
    assert hash(found)  # it is the key of caches


def test_the_trainer_knows_them_and_the_library_does_not():
    assert set(CORE) <= set(recipe_names())
    assert not set(CORE) & set(recipe.names())
    with pytest.raises(ValueError, match="precision 'te-delayed' is unknown"):
        recipe.by_name("te-delayed")


def test_what_is_installed_is_found_without_an_import(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(baselines, "PACKAGE", "json")
    assert baselines.installed()
    monkeypatch.setattr(baselines, "PACKAGE", "no_such_package")
    assert not baselines.installed()
