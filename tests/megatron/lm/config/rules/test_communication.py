"""Refusals about what travels."""

from dataclasses import replace

from helpers import refusals
from megatron.lm.config.rules.check import check
from megatron.lm.config.rules.communication import RULES
from msamp.comm import exchange
from msamp.numerics import recipe

# flags beside (and over) those of `refusals.GOOD`, what the message must hold, processes (1)
REFUSALS: list[refusals.Refusal] = [
    (
        "--tensor-model-parallel-size 2 --tp-wire fp8 --opt-level O2",
        "--tp-wire fp8 has no effect without --opt-level O3: drop it, or add --opt-level O3",
        2,
    ),
    (
        "--opt-level O3 --fp8-recipe blockwise --tensor-model-parallel-size 2 --tp-wire fp8",
        "--tp-wire fp8 has no effect without --fp8-recipe delayed or tensorwise: drop it, or add --fp8-recipe delayed or tensorwise",
        2,
    ),
    ("--opt-level O3 --tp-wire fp8", "--tp-wire fp8 has no effect without --tensor-model-parallel-size above 1: drop it, or add"),
    (
        "--opt-level O3 --tensor-model-parallel-size 2 --tp-saved-input gathered",
        "--tp-saved-input gathered has no effect without --sequence-parallel: drop it, or add --sequence-parallel",
        2,
    ),
    ("--tp-saved-input gathered", "without --opt-level O1, O2 or O3 and --sequence-parallel: drop it, or add"),
    (
        "--opt-level O2 --grad-accum-on owner --grad-accum-dtype fp32",
        "--grad-accum-on owner accumulates in FP32, and --grad-accum-dtype fp32 is for accumulation on each rank: drop one",
        2,
    ),
    (
        "--opt-level O2 --grad-accum-on owner --grad-exchange nccl",
        "--grad-accum-on owner requires sums in FP32, and --grad-exchange nccl has none: drop it, or use --grad-exchange fp32-sum",
        2,
    ),
    ("--grad-exchange nccl", "--grad-exchange nccl sums FP8 gradients, and precision bf16 has none: drop it, or use --opt", 2),
    (
        "--grad-format fp8-e4m3 --grad-exchange nccl",
        "--grad-exchange nccl sums FP8 gradients, and precision bf16 has none: drop it, or use --opt-level",
        2,
    ),
    (
        "--opt-level O2 --grad-format fp32 --grad-exchange nccl",
        "--grad-exchange nccl sums FP8 gradients, and --grad-format fp32 leaves none: drop one, or use --grad-format fp8-e4m3 or fp8-e5m2",
        2,
    ),
    ("--precision coat --grad-exchange nccl", "precision coat has none: drop it, or use --grad-format fp8-e4m3 or", 2),
    (
        "--grad-accum-dtype fp8-sr",
        "--grad-accum-dtype fp8-sr is for FP8 gradients, and precision bf16 has none: choose fp32, drop it, or use --opt-level O1",
    ),
    ("--precision fp32 --grad-accum-dtype bf16", "--grad-accum-dtype bf16 .* precision fp32 .* choose fp32, drop it"),
    (
        "--opt-level O1 --grad-format bf16 --grad-accum-dtype fp8",
        "--grad-accum-dtype fp8 is for FP8 .*--grad-format bf16 leaves none: choose fp32 or bf16, drop one, or use --grad",
    ),
    (
        "--opt-level O2 --grad-scaling auto",
        "--grad-scaling auto has no effect with --grad-exchange fp32-sum, .*has no mu: drop it, or use --grad-exchange nccl",
        2,
    ),
    ("--opt-level O2 --grad-scaling post", "--grad-scaling post has no effect with --grad-exchange fp32-sum", 2),
    ("--opt-level O2 --mu-rule halve", "--mu-rule halve has no effect with --grad-exchange fp32-sum, .*nccl", 2),
    (
        "--opt-level O2 --grad-exchange nccl --grad-scaling pre --mu-rule paper",
        "--mu-rule paper has no effect with --grad-scaling pre, which has a fixed mu: drop it, or use --grad-scaling auto",
        2,
    ),
]


test_refusal_names_value_and_fix, test_every_rule_is_proved_by_a_refusal = refusals.proof(RULES, REFUSALS)


def test_an_exchange_of_one_s_own_is_judged_by_what_it_says(monkeypatch):
    monkeypatch.setattr(exchange, "_EXCHANGES", dict(exchange._EXCHANGES))
    exchange.register(exchange.Exchange(name="mine", wire=exchange.NCCLWire, sums_in_fp32=False, scalings=("post", "pre")))
    check(refusals.config("--opt-level O2 --grad-exchange mine --grad-scaling pre"), 2)
    refusals.assert_refused(
        "--opt-level O2 --grad-exchange mine --grad-scaling auto",
        "--grad-scaling auto is not a scaling of --grad-exchange mine: choose one of post, pre",
        2,
    )
    refusals.assert_refused(
        "--opt-level O2 --grad-exchange mine --mu-rule halve",
        "--mu-rule halve has no effect with --grad-scaling post, which has a fixed mu: drop it$",
        2,
    )
    refusals.assert_refused("--opt-level O2 --mu-rule halve", "drop it, or use --grad-exchange nccl or mine", 2)
    refusals.assert_refused("--grad-exchange mine", "--grad-exchange mine sums FP8 gradients, and precision bf16 has none", 2)


def test_a_recipe_of_one_s_own_with_an_fp8_wire_takes_the_flags_of_the_wire(monkeypatch):
    monkeypatch.setattr(recipe, "_TABLE", dict(recipe._TABLE))
    recipe.register(replace(recipe.O3, name="mine"))
    recipe.register(replace(recipe.O3, name="mine-bf16-wire", fp8_wire=False))
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --tp-wire fp8 --tp-saved-input gathered"
    check(refusals.config(f"--precision mine {flags}"), 2)
    assert refusals.config("--precision mine").shards_optimizer
    refusals.assert_refused(f"--precision mine-bf16-wire {flags}", "--tp-wire fp8 has no effect without --opt-level O3", 2)
