"""Which recipe the flags name, and how they vary it."""

import dataclasses
import pickle

import pytest

from megatron.lm.config import PrecisionConfig, baselines
from megatron.lm.config.precision import amax_algorithms, gemm_names, recipe_names
from msamp.numerics import recipe


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({}, "bf16"),
        ({"bf16": True}, "bf16"),
        ({"opt_level": "O0"}, "bf16"),
        ({"fp16": True}, "fp16-amp"),
        ({"opt_level": "O0", "precision": "bf16", "bf16": True}, "bf16"),
        ({"precision": "fp32"}, "fp32"),
        ({"opt_level": "O2"}, "O2"),
        ({"opt_level": "O3", "precision": "O3"}, "O3"),
    ],
)
def test_recipe_name(flags, name):
    precision = PrecisionConfig(**flags)
    assert precision.name == name
    assert precision.named == precision.recipe == recipe.by_name(name)


def test_the_recipe_is_made_once_and_does_not_travel():
    precision = PrecisionConfig(precision="O3", optimizer_state="coat")
    assert precision.recipe is precision.recipe
    sent = pickle.loads(pickle.dumps(precision))
    assert (sent, hash(sent), vars(sent).get("recipe")) == (precision, hash(precision), None)
    assert sent.recipe == precision.recipe
    assert dataclasses.replace(precision, optimizer_state=None).recipe == recipe.by_name("O3")


def test_contradictory_recipes_have_no_name():
    with pytest.raises(ValueError, match=r"--opt-level O2 and --bf16 contradict each other: keep one"):
        _ = PrecisionConfig(opt_level="O2", bf16=True).name


@pytest.mark.parametrize(
    ("flags", "has_fp8_gradients", "accumulated_in"),
    [
        ({}, False, "fp32"),
        ({"precision": "fp32"}, False, "fp32"),
        ({"opt_level": "O1"}, True, "bf16"),
        ({"opt_level": "O2", "grad_format": "fp8-e5m2"}, True, "bf16"),
        ({"opt_level": "O2", "grad_format": "bf16"}, False, "fp32"),
        ({"opt_level": "O3", "grad_accum_dtype": "fp8-sr"}, True, "fp8-sr"),
        ({"precision": "coat"}, False, "bf16"),
        ({"precision": "coat", "grad_format": "fp32"}, False, "fp32"),
        ({"precision": "coat", "grad_format": "fp8-e4m3"}, True, "bf16"),
    ],
)
def test_gradients_of_micro_batches(flags, has_fp8_gradients, accumulated_in):
    precision = PrecisionConfig(**flags)
    assert (precision.named.fp8 and precision.recipe.fp8_gradients) is has_fp8_gradients
    assert precision.grad_accum == accumulated_in


@pytest.mark.parametrize("name", recipe.names())
def test_a_recipe_by_itself_is_what_its_constant_says(name):
    precision = PrecisionConfig(precision=name)
    assert precision.recipe == recipe.by_name(name)
    assert precision.kept_activations == recipe.by_name(name).activations
    assert precision.grad_accum == recipe.by_name(name).accumulator
    assert PrecisionConfig(precision=name, save_activations="coat").kept_activations == "coat"


def test_choices_are_those_of_the_tables():
    assert recipe_names() == (*recipe.names(), *baselines.names())
    assert gemm_names() == tuple(recipe.GEMMS)
    assert amax_algorithms() == ("max", "most_recent")


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(ValueError, match="precision 'int8' is unknown; choose one of fp32, "):
        _ = PrecisionConfig(precision="int8").recipe
