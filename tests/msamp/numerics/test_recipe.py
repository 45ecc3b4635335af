import pytest
import torch

from msamp.numerics import formats, recipe
from msamp.numerics.scaling import Current, Delayed


def names(r: recipe.Recipe) -> tuple[str, ...]:
    return r.compute.name, r.weight.name, *(getattr(r.states, f).name for f in ("master", "grad", "m", "v"))


LEVELS = {
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
}


def test_the_table_of_levels():
    assert {name: names(recipe.by_name(name)) for name in LEVELS} == LEVELS


def test_every_preset_is_found_by_its_name_and_o0_is_bf16():
    assert all(recipe.by_name(r.name) is r for r in recipe.ALL)
    assert recipe.by_name("O0") is recipe.BF16


@pytest.mark.parametrize("bad", ["O4", "o2", "", "fp8"])
def test_an_unknown_name_lists_those_accepted(bad):
    with pytest.raises(ValueError, match=rf"'{bad}'.*fp32, .*bf16, .*, O1, O2, O3"):
        recipe.by_name(bad)


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


def test_the_scaling_rule_is_replaced_for_activations_and_grad_outputs():
    gemm = recipe.O3.with_scaling(Current()).gemm
    assert gemm.input.scaling == gemm.grad_output.scaling == Current()
    assert recipe.BF16.with_scaling(Current()) is recipe.BF16


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


def test_only_an_fp8_recipe_casts_in_another_way():
    assert recipe.O2.with_gemm(recipe.GEMMS["tensorwise"]) == recipe.O2.with_scaling(Current())
    with pytest.raises(ValueError, match="recipe bf16 has no FP8 GEMM"):
        recipe.BF16.with_gemm(recipe.GEMMS["tensorwise"])


def test_every_recipe_can_be_described() -> None:
    assert all(recipe.describe(recipe.by_name(name)).startswith("GEMMs") for name in recipe.names())
