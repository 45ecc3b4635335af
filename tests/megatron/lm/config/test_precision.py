"""Which recipe the flags name, how they vary it, and the formats of each kind of parameter."""

from dataclasses import dataclass, field, replace

import pytest

from megatron.lm.config import PrecisionConfig
from megatron.lm.config.from_checkpoint import with_saved_rounding, with_saved_scaling
from megatron.lm.config.sections.precision import build_recipe, rule_setting, saved_activations
from msamp.nn.saved_activations import AS_IT_IS, IN_GROUPS
from msamp.numerics import formats, recipe
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.recipe import FP32_STATES, StateFormats
from msamp.numerics.scaling import Current, Delayed, Scaling, scale_from_amax


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


def test_recipes_of_the_flags():
    assert build_recipe(PrecisionConfig()) == recipe.BF16
    assert build_recipe(PrecisionConfig(opt_level="O0")) == recipe.BF16
    assert build_recipe(PrecisionConfig(precision="fp32")) == recipe.FP32
    for level in ("O1", "O2", "O3"):
        assert build_recipe(PrecisionConfig(opt_level=level)) == recipe.by_name(level)
    current = build_recipe(PrecisionConfig(opt_level="O2", fp8_recipe="tensorwise"))
    assert current.gemm.input.scaling == current.gemm.grad_output.scaling == Current()
    assert build_recipe(PrecisionConfig(opt_level="O2")).gemm.input.scaling == Delayed(16)
    assert build_recipe(PrecisionConfig(precision="coat")) == recipe.COAT
    assert build_recipe(PrecisionConfig(precision="coat", fp8_recipe="delayed")).gemm == recipe.O2.gemm


FAST = {None: (True, False, False), "none": (False, False, False), "output": (True, False, False), "all": (True, True, True)}


@pytest.mark.parametrize("way", FAST)
def test_fast_accumulation_of_the_flags(way: str | None):
    for level in ("O1", "O2", "O3", "coat"):
        plain, gemm = (build_recipe(PrecisionConfig(precision=level, fp8_fast_accumulation=which)).gemm for which in (None, way))
        assert (gemm.output.fast, gemm.grad_input.fast, gemm.grad_weight.fast) == FAST[way]
        assert gemm.casts == plain.casts


def test_state_formats_of_the_flags():
    flags = PrecisionConfig(
        opt_level="O2", master_format="fp32", grad_format="fp8-e5m2", exp_avg_format="bf16", exp_avg_sq_format="fp8-e4m3"
    )
    own = recipe.O2.states.moment_rounding  # of masters in FP32 nothing is rounded
    assert build_recipe(flags).states == StateFormats(formats.FP32, formats.E5M2, formats.BF16, formats.E4M3, moment_rounding=own)


def test_coat_keeps_activations_in_groups_unless_told_otherwise():
    assert saved_activations(PrecisionConfig(precision="coat")) is IN_GROUPS
    assert saved_activations(PrecisionConfig(precision="coat", save_activations="compute")) is AS_IT_IS
    assert saved_activations(PrecisionConfig(precision="O3")) is AS_IT_IS
    assert saved_activations(PrecisionConfig(precision="bf16", save_activations="coat")) is IN_GROUPS


@pytest.mark.parametrize("precision", ["fp32", "O1", "O3"])
def test_coat_s_moments_at_every_precision(precision: str):
    own = recipe.by_name(precision).states
    states = build_recipe(PrecisionConfig(precision=precision, optimizer_state="coat")).states
    assert states == StateFormats(own.master, own.grad, formats.COAT_E4M3, formats.COAT_E4M3, master_rounding=own.master_rounding)
    mixed = PrecisionConfig(precision=precision, optimizer_state="coat", exp_avg_sq_format="coat-e5m2")
    assert build_recipe(mixed).states.v == formats.COAT_E5M2
    alone = build_recipe(PrecisionConfig(precision=precision, exp_avg_format="coat-e5m2"))
    assert (alone.states.m, alone.states.v) == (formats.COAT_E5M2, own.v)
    assert alone.formats_of("matrix").m == formats.COAT_E5M2
    assert alone.formats_of("vector") == FP32_STATES


def test_roundings_of_the_flags():
    flags = PrecisionConfig(opt_level="O2", master_rounding="stochastic", moment_rounding="nearest")
    for kind in ("linear", "matrix"):
        states = build_recipe(flags).formats_of(kind)
        assert (states.master_rounding, states.moment_rounding) == ("stochastic", "nearest")
    assert build_recipe(flags).formats_of("vector") == FP32_STATES
    with pytest.raises(ValueError, match="master_rounding"):
        build_recipe(PrecisionConfig(opt_level="O2", master_format="fp32", master_rounding="stochastic"))
    with pytest.raises(ValueError, match="plus"):
        build_recipe(PrecisionConfig(precision="collage-plus", master_rounding="stochastic"))


def test_a_resume_rounds_as_the_saved_run_unless_told_otherwise():
    def resumed(saved, **flags):
        states = with_saved_rounding(PrecisionConfig(**flags), PrecisionConfig(**saved)).recipe.states
        return states.master_rounding, states.moment_rounding

    both, none = (
        {"master_rounding": "stochastic", "moment_rounding": "stochastic"},
        {"master_rounding": "nearest", "moment_rounding": "nearest"},
    )
    assert resumed({"opt_level": "O2", **both}, opt_level="O2") == ("stochastic", "stochastic")
    assert resumed({"opt_level": "O2", **none}, opt_level="O2") == ("nearest", "nearest")
    assert resumed({"opt_level": "O2", **none}, opt_level="O2", master_rounding="stochastic") == ("stochastic", "nearest")
    assert resumed({"opt_level": "O2", **both}, opt_level="O1") == ("stochastic", "nearest")  # whose moments are FP32
    assert resumed({"opt_level": "O2", **both}, precision="bf16") == ("nearest", "nearest")
    own = PrecisionConfig(opt_level="O2").recipe.states
    assert with_saved_rounding(PrecisionConfig(opt_level="O2"), None).recipe.states == own


DELAYED = Delayed(4, "most_recent", 2)
FLAGS = {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "most_recent", "fp8_margin": 2}


@pytest.mark.parametrize(("name", "more"), [("O1", {}), ("O3", {}), ("coat", {"fp8_recipe": "delayed"})])
def test_delayed_scaling_takes_what_the_flags_say(name: str, more: dict[str, str]):
    gemm = build_recipe(PrecisionConfig(precision=name, **more, **FLAGS)).gemm
    assert gemm == recipe.Gemms.of(recipe.Cast(E4M3, DELAYED), recipe.Cast(E4M3, Current()), recipe.Cast(E5M2, DELAYED))
    short = build_recipe(PrecisionConfig(precision=name, **more, fp8_amax_history_len=1)).gemm
    assert short.input.scaling == short.grad_output.scaling == Delayed(1)


@dataclass(frozen=True)
class Halved(Scaling):
    """A rule of one's own, with a setting that a flag names and none of the others."""

    window: int = field(default=0, init=False)
    margin: int = 1

    def next_scale(self, history, fp_max, last=1.0):
        return scale_from_amax(history[..., -1], fp_max * 2.0**-self.margin, last)


def test_a_registered_recipe_keeps_its_rule_and_takes_the_settings_that_it_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recipe, "_TABLE", dict(recipe._TABLE))
    own = recipe.Gemms.of(recipe.Cast(E4M3, Halved()), recipe.Cast(E4M3, Current()), recipe.Cast(E5M2, Halved()))
    recipe.register(replace(recipe.O2, name="halved", gemm=own))
    assert build_recipe(PrecisionConfig(precision="halved")).gemm == own
    wider = build_recipe(PrecisionConfig(precision="halved", fp8_margin=3)).gemm
    assert wider.input.scaling == Halved(3)
    assert rule_setting(PrecisionConfig(precision="halved"), "fp8_margin") == 1
    assert rule_setting(PrecisionConfig(precision="halved"), "fp8_amax_history_len") is None
    assert build_recipe(PrecisionConfig(precision="halved", fp8_recipe="delayed")).gemm == recipe.O2.gemm


SAVED_RUNS = {
    "a window": {"opt_level": "O2", "fp8_amax_history_len": 32},
    "all of it": {"opt_level": "O1", "fp8_recipe": "delayed", **FLAGS},
    "just in time": {"opt_level": "O3", "fp8_recipe": "tensorwise"},
    "the recipe's own": {"opt_level": "O2"},
}


@pytest.mark.parametrize(("name", "level"), zip(SAVED_RUNS, ("O1", "O2", "O3", "O2"), strict=True))
def test_a_resume_takes_the_checkpoint_s_scaling(name: str, level: str):
    saved = PrecisionConfig(**SAVED_RUNS[name])
    resumed = with_saved_scaling(PrecisionConfig(opt_level=level), saved)
    assert resumed.recipe.gemm == saved.recipe.gemm
    assert resumed.name == level
    assert with_saved_scaling(resumed, resumed) == resumed


@pytest.mark.parametrize(
    ("saved", "given", "said"),
    [
        ({}, {"fp8_recipe": "tensorwise"}, r"--fp8-recipe tensorwise \(saved: delayed\)"),
        ({"fp8_recipe": "tensorwise"}, {"fp8_margin": 1}, r"--fp8-margin 1 \(saved: none\)"),
        (FLAGS, {"fp8_amax_compute_algo": "max", "fp8_margin": 0}, r"algo max \(saved: most_recent\); --fp8-margin 0 \(saved: 2\)"),
    ],
)
def test_a_resume_with_other_values_is_refused_with_both_and_the_ways_out(saved: dict, given: dict, said: str):
    with pytest.raises(ValueError, match=said):
        with_saved_scaling(PrecisionConfig(opt_level="O2", **given), PrecisionConfig(opt_level="O2", **saved))
