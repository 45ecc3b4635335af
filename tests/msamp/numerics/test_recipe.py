import dataclasses
from dataclasses import replace

import pytest
import torch

from msamp.numerics import formats, recipe
from msamp.numerics.formats import BF16, E4M3, FP32
from msamp.numerics.scaling import Current, Delayed


def names(r: recipe.Recipe) -> tuple[str, ...]:
    return r.compute.name, r.weight.name, *(getattr(r.states, f).name for f in ("master", "grad", "m", "v"))


@pytest.mark.parametrize(
    ("name", "want"),
    {
        "fp32": ("fp32", "fp32", "fp32", "fp32", "fp32", "fp32"),
        "fp16-amp": ("fp16", "fp16", "fp32", "fp32", "fp32", "fp32"),
        "bf16": ("bf16", "bf16", "fp32", "fp32", "fp32", "fp32"),
        **dict.fromkeys(("bf16-a", "bf16-kahan", "collage-light", "collage-plus", "collage-fp8"), ("bf16",) * 6),
        "bf16-dmw": ("bf16", "bf16", "bf16", "bf16", "fp32", "fp32"),
        "bf16-d": ("bf16", "bf16", "fp32", "bf16", "fp32", "fp32"),
        "coat": ("bf16", "fp8-e4m3", "fp32", "bf16", "coat-e4m3", "coat-e4m3"),
        "O1": ("bf16", "fp16", "fp16", "fp8-e4m3", "fp32", "fp32"),
        "O2": ("bf16", "fp16", "fp16", "fp8-e4m3", "fp8-e4m3", "fp16"),
        "O3": ("bf16", "fp8-e4m3", "fp16", "fp8-e4m3", "fp8-e4m3", "fp16"),
    }.items(),
)
def test_the_table_of_levels(name, want):
    assert names(recipe.by_name(name)) == want


def test_every_preset_is_found_by_its_name_and_o0_is_bf16():
    assert all(recipe.by_name(r.name) is r for r in recipe.ALL)
    assert recipe.by_name("O0") is recipe.BF16


@pytest.mark.parametrize("bad", ["O4", "o2", "", "fp8"])
def test_an_unknown_name_lists_those_accepted(bad):
    with pytest.raises(ValueError, match=rf"'{bad}'.*fp32, .*bf16, .*, O1, O2, O3"):
        recipe.by_name(bad)


def test_fp16_amp_has_plain_fp16_and_scales_the_loss():
    assert recipe.FP16_AMP.compute is recipe.FP16_AMP.weight is formats.PLAIN_FP16
    assert [r.name for r in recipe.ALL if r.scales_loss] == ["fp16-amp"]


def test_operands_of_the_three_gemms():
    gemm = recipe.O2.gemm
    assert (gemm.input.format, gemm.weight.format, gemm.grad_output.format) == (formats.E4M3, formats.E4M3, formats.E5M2)
    assert gemm.input.scaling == gemm.grad_output.scaling == Delayed(16)
    assert gemm.weight.scaling == Current()
    assert recipe.COAT.gemm == recipe.O2.with_scaling(Current()).gemm
    assert recipe.O2.fp8
    assert not recipe.BF16.fp8
    assert recipe.O1.compute_dtype == torch.bfloat16
    assert recipe.FP32.compute_dtype == torch.float32


def test_states_are_replaced_one_by_one():
    changed = recipe.O2.with_states(master=formats.BF16, v=None)
    assert names(changed)[2:] == ("bf16", "fp8-e4m3", "fp8-e4m3", "fp16")
    assert names(recipe.O2)[2] == "fp16"


def test_the_scaling_rule_is_replaced_for_activations_and_grad_outputs():
    gemm = recipe.O3.with_scaling(Current()).gemm
    assert gemm.input.scaling == gemm.grad_output.scaling == Current()
    assert recipe.BF16.with_scaling(Current()) is recipe.BF16


def test_recipes_are_data():
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.O2.name = "mine"
    assert str(recipe.O2.states) == "master fp16, grad fp8-e4m3, m fp8-e4m3, v fp16"
    assert str(recipe.O2.gemm.input) == "fp8-e4m3 delayed(16)"


def test_the_options_of_collage_hold_for_every_parameter():
    found = {r.name: r.states.update for r in recipe.ALL if r.vectors == r.states}
    assert found == {
        "fp32": "fp32",
        "fp16-amp": "fp32",
        "bf16": "fp32",
        "bf16-a": "a",
        "bf16-kahan": "kahan",
        "bf16-dmw": "fp32",
        "bf16-d": "fp32",
        "collage-light": "light",
        "collage-plus": "plus",
        "collage-fp8": "fp8",
    }


def test_a_registered_recipe_is_known_by_its_name(monkeypatch):
    monkeypatch.setattr(recipe, "_TABLE", dict(recipe._TABLE))
    own = replace(recipe.O2, name="test-own")
    assert recipe.register(own) is own
    assert recipe.register(replace(own)) is own  # twice is once
    assert recipe.by_name("test-own") is own
    assert "test-own" in recipe.names()
    with pytest.raises(ValueError, match="'test-own' already names another recipe"):
        recipe.register(replace(own, fp8_wire=True))


def test_recipes_say_their_facts():
    assert {r.name for r in recipe.ALL if r.shards_optimizer} == {r.name for r in recipe.ALL if r.fp8_wire} == {"O3"}
    assert {r.name for r in recipe.ALL if r.fp8_gradients} == {"O1", "O2", "O3"}
    assert {r.name for r in recipe.ALL if r.activations == "coat"} == {"coat"}
    assert {r.name for r in recipe.ALL if r.accumulator == "fp32"} == {"fp32", "fp16-amp", "bf16"}


def test_another_gradient_format_brings_its_accumulator():
    assert recipe.O2.with_states(grad=BF16).accumulator == "fp32"
    assert recipe.COAT.with_states(grad=BF16).accumulator == "bf16"
    assert recipe.COAT.with_states(grad=E4M3).accumulator == "bf16"
    assert recipe.O2.with_states(m=FP32).accumulator == "bf16"


def test_each_gemm_says_its_operands_and_its_accumulation():
    gemm = recipe.O2.gemm
    assert (gemm.output.fast, gemm.grad_input.fast, gemm.grad_weight.fast) == (True, False, False)
    assert (gemm.output.left, gemm.grad_weight.right) == (gemm.input, gemm.input)
    assert (gemm.output.right, gemm.grad_input.right) == (gemm.weight, gemm.weight)
    assert (gemm.grad_input.left, gemm.grad_weight.left) == (gemm.grad_output, gemm.grad_output)


def test_only_an_fp8_recipe_casts_in_another_way():
    assert recipe.O2.with_gemm(recipe.GEMMS["tensorwise"]) == recipe.O2.with_scaling(Current())
    with pytest.raises(ValueError, match="recipe bf16 has no FP8 GEMM"):
        recipe.BF16.with_gemm(recipe.GEMMS["tensorwise"])


def test_an_operand_s_bytes_have_its_share_of_the_scales():
    bytes_of = {name: gemm.input.element_bytes for name, gemm in recipe.GEMMS.items()}
    assert bytes_of == {
        "delayed": 1,
        "tensorwise": 1,
        "blockwise": 1 + 4 / 128,
        "blockwise-power-of-two": 1 + 4 / 128,
        "mxfp8": 1 + 1 / 32,
    }
    assert recipe.GEMMS["blockwise"].weight.element_bytes == 1 + 4 / 128**2
