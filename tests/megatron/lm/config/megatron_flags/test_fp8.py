"""Flags of FP8 and of the formats of states, as Megatron-LM means them."""

from pathlib import Path

import pytest

from helpers import refusals, tiny
from megatron.lm.config.cli import known_flags
from megatron.lm.config.megatron_flags.apply import apply
from megatron.lm.config.rules.check import check

AWARE = "--fp8-format hybrid --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp16"
FP32 = "--master-format fp32 --grad-format fp32 --exp-avg-format fp32 --exp-avg-sq-format fp32"


def becomes(line: str) -> str:
    return " ".join(apply(line.split(), known_flags()).argv)


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("--bf16 --fp8-format hybrid", f"--opt-level O1 {FP32}"),
        ("--bf16 --fp8-hybrid --fp8-recipe tensorwise", f"--opt-level O1 {FP32} --fp8-recipe tensorwise"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise", f"--opt-level O1 {FP32} --fp8-recipe blockwise"),
        ("--bf16 --fp8-format hybrid --fp8-param-gather", f"--opt-level O3 {FP32}"),
        ("--bf16 --fp8-format hybrid --grad-reduce-in-bf16", f"--opt-level O1 {FP32.replace('grad-format fp32', 'grad-format bf16')}"),
        (
            f"{AWARE} --main-grads-dtype bf16",
            "--opt-level O1 --exp-avg-format fp8-e4m3 --exp-avg-sq-format fp16 --master-format fp16 --grad-format bf16",
        ),
        ("--opt-level O2 --fp8-format hybrid", "--opt-level O2"),
        ("--opt-level O2 --bf16-linears linear_fc1 --fp8-hybrid", "--opt-level O2 --bf16-linears linear_fc1"),
        ("--opt-level O3 --fp8-param-gather --exp-avg-dtype fp32", "--opt-level O3 --exp-avg-format fp32"),
        ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8", "--bf16 --exp-avg-format coat-e4m3"),
        ("--bf16 --exp-avg-dtype fp32 --main-grads-dtype fp32 --fp8-param-gather", "--bf16"),
        ("--fp8-hybrid --optimizer-state coat", "--opt-level O1 --master-format fp32 --grad-format fp32 --optimizer-state coat"),
    ],
)
def test_what_the_flags_become(line: str, argv: str):
    assert becomes(line) == argv


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--bf16 --fp8-format e4m3", "--fp8-format e4m3: gradients are E5M2 with --fp8-recipe delayed: use hybrid, or --fp8-recipe block"),
        ("--bf16 --fp8-format hybrid --fp8-recipe mxfp8", "--fp8-format hybrid: --fp8-recipe mxfp8 uses only E4M3: use --fp8-format e4m3"),
        ("--bf16 --fp8-format e5m2", "--fp8-format e5m2: give hybrid or e4m3"),
        ("--fp16 --fp8-format hybrid", "--fp8-format hybrid: it contradicts the precision that another flag selects"),
        ("--precision bf16 --fp8-hybrid", "--fp8-hybrid: it contradicts the precision that another flag selects"),
        ("--opt-level O2 --fp8-param-gather", "--fp8-param-gather: weights are FP8 at O3, not at O2: use --opt-level O3, or drop it"),
        ("--bf16 --exp-avg-sq-dtype fp16", "--exp-avg-sq-dtype fp16: the state is FP32 without FP8 GEMMs: add --fp8-format hybrid"),
        ("--bf16 --main-grads-dtype bf16", "--main-grads-dtype bf16: the state is FP32 without FP8 GEMMs"),
        ("--fp8-format hybrid --exp-avg-dtype int8", "--exp-avg-dtype int8: give one of fp32, fp16, bf16, fp8"),
    ],
)
def test_what_no_level_has_is_refused_by_name(line: str, said: str):
    with pytest.raises(ValueError, match="^" + said):
        becomes(line)


TRAINED = {
    "hybrid": "--fp8-format hybrid",
    "hybrid, gathered": "--fp8-format hybrid --fp8-param-gather",
    "e4m3": "--fp8-format e4m3 --fp8-recipe blockwise",
    "precision-aware": AWARE,
    "moments alone": "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
}


@pytest.mark.promise("Megatron flags", "`--bf16 --fp8-format hybrid` trains in FP8 GEMMs with FP32 masters, gradients and moments.")
@pytest.mark.parametrize(
    "name", [name if name in ("hybrid", "precision-aware") else pytest.param(name, marks=pytest.mark.nightly(2)) for name in TRAINED]
)
def test_what_the_flags_become_trains(prefix: Path, name: str):
    made = refusals.config(f"--bf16 {TRAINED[name]} --fp8-min-gain 0 --data-path {prefix} --vocab-size 60 --train-iters 3")
    check(made, 1)
    recipe = made.precision.recipe
    assert (recipe.gemm is not None) == ("fp8-format" in TRAINED[name])
    if name == "hybrid":
        assert {str(getattr(recipe.states, key)) for key in ("master", "grad", "m", "v")} == {"fp32"}
    settings = {key: getattr(made.precision, key) for key in ("opt_level", "bf16", "fp8_recipe", *STATES)}
    losses = tiny.losses(tiny.run(tiny.config(prefix, train_iters=12, **settings)))
    assert losses[-1] < losses[0]


STATES = ("master_format", "grad_format", "exp_avg_format", "exp_avg_sq_format")
