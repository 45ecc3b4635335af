"""Flags -> recipe, and the formats of each kind of parameter."""

import pytest

from megatron.lm.config import PRECISIONS, PrecisionConfig
from megatron.lm.recipe import build_recipe, saved_activations, states_by_kind
from msamp.nn.saved import AS_IT_IS, COAT
from msamp.numerics import formats, recipe
from msamp.numerics.recipe import FP32_STATES, StateFormats
from msamp.numerics.scaling import Current, Delayed


def test_recipes_of_the_flags():
    assert build_recipe(PrecisionConfig()) == recipe.BF16
    assert build_recipe(PrecisionConfig(opt_level="O0")) == recipe.BF16
    assert build_recipe(PrecisionConfig(precision="fp32")) == recipe.FP32
    for level in ("O1", "O2", "O3"):
        assert build_recipe(PrecisionConfig(opt_level=level)) == recipe.by_name(level)
    current = build_recipe(PrecisionConfig(opt_level="O2", fp8_scaling="current"))
    assert current.gemm.input.scaling == current.gemm.grad_output.scaling == Current()
    assert build_recipe(PrecisionConfig(opt_level="O2")).gemm.input.scaling == Delayed(16)
    assert build_recipe(PrecisionConfig(precision="coat")) == recipe.COAT
    assert build_recipe(PrecisionConfig(precision="coat", fp8_scaling="delayed")).gemm == recipe.O2.gemm


def test_state_formats_of_the_flags():
    flags = PrecisionConfig(
        opt_level="O2", master_format="fp32", grad_format="fp8-e5m2", exp_avg_format="bf16", exp_avg_sq_format="fp8-e4m3"
    )
    assert build_recipe(flags).states == StateFormats(formats.FP32, formats.E5M2, formats.BF16, formats.E4M3)


def test_coat_keeps_activations_in_groups_unless_told_otherwise():
    assert saved_activations(PrecisionConfig(precision="coat")) is COAT
    assert saved_activations(PrecisionConfig(precision="coat", save_activations="compute")) is AS_IT_IS
    assert saved_activations(PrecisionConfig(precision="O3")) is AS_IT_IS
    assert saved_activations(PrecisionConfig(precision="bf16", save_activations="coat")) is COAT


@pytest.mark.parametrize("precision", ["fp32", "bf16", "O1", "O2", "O3"])
def test_coat_s_moments_at_every_precision(precision: str):
    own = recipe.by_name(precision).states
    states = build_recipe(PrecisionConfig(precision=precision, optimizer_state="coat")).states
    assert states == StateFormats(own.master, own.grad, formats.COAT_E4M3, formats.COAT_E4M3)
    mixed = PrecisionConfig(precision=precision, optimizer_state="coat", exp_avg_sq_format="coat-e5m2")
    assert build_recipe(mixed).states.v == formats.COAT_E5M2
    alone = build_recipe(PrecisionConfig(precision=precision, exp_avg_format="coat-e5m2"))
    assert (alone.states.m, alone.states.v) == (formats.COAT_E5M2, own.v)
    assert states_by_kind(alone)["matrix"].m == formats.COAT_E5M2
    assert states_by_kind(alone)["vector"] == FP32_STATES


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_kinds_at_the_fp8_levels(level: str):
    states = recipe.by_name(level).states
    kinds = states_by_kind(recipe.by_name(level))
    assert kinds["linear"] == states
    assert kinds["matrix"] == StateFormats(states.master, formats.BF16, states.m, states.v)
    assert kinds["vector"] == FP32_STATES


@pytest.mark.parametrize("other", [r for r in recipe.ALL if not r.fp8], ids=lambda r: r.name)
def test_kinds_without_fp8(other: recipe.Recipe):
    assert states_by_kind(other) == dict.fromkeys(("linear", "matrix", "vector"), other.states)


def test_the_flag_names_recipes_and_knows_their_gradients():
    assert tuple(r.name for r in recipe.ALL if r.name in PRECISIONS) == PRECISIONS  # a list of its own: config.py must not import torch
    for r in map(recipe.by_name, PRECISIONS):
        flags = PrecisionConfig(precision=r.name)
        assert flags.is_fp8 == r.fp8
        assert flags.has_bf16_gradients == (r.states.grad == formats.BF16)
        assert flags.grad_accum == ("fp32" if r.states.grad == formats.FP32 else "bf16")
