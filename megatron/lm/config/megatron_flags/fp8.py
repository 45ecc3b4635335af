"""Translate Megatron-LM's flags for FP8 and for optimizer-state formats to a level and its formats.

`--bf16 --fp8-format hybrid` computes linear layers in FP8, from BF16 weights with FP32 masters, gradients and moments. Here that is O1 with
FP32 formats, whose stored weight is FP16. With `--fp8-param-gather`, which stores and gathers FP8 weights, it is O3 with FP32 formats.
Formats that other flags give take precedence. Without FP8 GEMMs, FP8 moments use COAT's format, which every recipe of AdamW supports.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron.lm.config.megatron_flags.in_context import Given, Values
from megatron.lm.config.megatron_flags.topics.row import DROPPED, REFUSED, TRANSLATED, Verdict
from megatron.lm.config.sections.precision import recipe_by_name

if TYPE_CHECKING:
    from msamp.numerics.recipe import Recipe

FP8_FLAGS = ("--fp8-format", "--fp8-hybrid")
GATHER = ("--fp8-param-gather", "--fp8-param")
BLOCKS = ("blockwise", "blockwise-power-of-two", "mxfp8")  # E4M3 in all three GEMMs
FP8 = "fp8-e4m3"
FORMATS = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": FP8}
MOMENTS = ("--exp-avg-dtype", "--exp-avg-sq-dtype")
# Flag -> the trainer's; one column per state.
STATES = {
    "--main-params-dtype": "--master-format",
    "--main-grads-dtype": "--grad-format",
    "--exp-avg-dtype": "--exp-avg-format",
    "--exp-avg-sq-dtype": "--exp-avg-sq-format",
}


def asks_for_fp8(given: Given) -> bool:
    """Return whether Megatron-LM would compute in FP8 with these flags."""
    return any(flag in given.flags for flag in FP8_FLAGS)


def _level(given: Given) -> "Recipe | None":
    """Return the recipe that the trainer's own flags name; None if it has no FP8 GEMMs or is unknown."""
    named = given.value("--opt-level") or given.value("--precision")
    try:
        recipe = None if named is None else recipe_by_name(named)
    except ValueError:  # argparse or `check` reports it
        return None
    return recipe if recipe is not None and recipe.fp8 else None


def _fp8_format(given: Given, values: Values) -> Verdict | None:
    kind, recipe = values[0] if values else "hybrid", given.value("--fp8-recipe") or "delayed"
    if kind not in ("hybrid", "e4m3"):
        return Verdict(REFUSED, "give hybrid or e4m3")
    if kind == "e4m3" and recipe not in BLOCKS:
        fix = "use hybrid, or --fp8-recipe blockwise, which uses only E4M3"
        return Verdict(REFUSED, f"gradients are E5M2 with --fp8-recipe {recipe}: {fix}")
    if kind == "hybrid" and recipe in BLOCKS:
        return Verdict(REFUSED, f"--fp8-recipe {recipe} uses only E4M3: use --fp8-format e4m3")
    level = _level(given)
    if level is not None:
        return Verdict(DROPPED, f"{level.name} already computes in it")
    if "--fp16" in given.flags or "--precision" in given.flags or "--opt-level" in given.flags:
        return Verdict(
            REFUSED, "it contradicts the precision that another flag selects: give it with --bf16, or give only --opt-level O1, O2 or O3"
        )
    gathers = any(flag in given.flags for flag in GATHER)
    words = ["--opt-level", "O3" if gathers else "O1"]
    for theirs, ours in STATES.items():
        if ours in given.flags or theirs in given.flags or ("--exp-avg" in ours and "--optimizer-state" in given.flags):
            continue
        words += [ours, "bf16" if ours == "--grad-format" and "--grad-reduce-in-bf16" in given.flags else "fp32"]
    return Verdict(TRANSLATED, "", tuple(words))


def _bf16(given: Given, values: Values) -> Verdict | None:
    if asks_for_fp8(given) and _level(given) is None:
        return Verdict(DROPPED, "the level that --fp8-format selects computes everything else in BF16")
    return None


def _fp8_param_gather(given: Given, values: Values) -> Verdict | None:
    if asks_for_fp8(given) and _level(given) is None:
        return Verdict(DROPPED, "with it, --fp8-format selects O3, whose weights are FP8")
    level = _level(given)
    if level is None:
        return None
    if level.weight.bytes == 1:
        return Verdict(DROPPED, f"{level.name} already stores and gathers FP8 weights")
    return Verdict(REFUSED, f"weights are FP8 at O3, not at {level.name}: use --opt-level O3, or drop it")


def _grad_reduce_in_bf16(given: Given, values: Values) -> Verdict | None:
    if asks_for_fp8(given) and _level(given) is None:
        return Verdict(DROPPED, "with it, --fp8-format selects --grad-format bf16")
    return None


def _state(flag: str) -> Callable[[Given, Values], Verdict | None]:
    def judge(given: Given, values: Values) -> Verdict | None:
        fmt = FORMATS.get(values[0])
        if fmt is None:
            return Verdict(REFUSED, f"give one of {', '.join(FORMATS)}")
        if asks_for_fp8(given) or _level(given) is not None:
            return Verdict(TRANSLATED, "", (STATES[flag], fmt))
        if fmt == "fp32":
            return Verdict(DROPPED, "states are FP32 unless the recipe has other formats")
        if fmt == FP8 and flag in MOMENTS:
            return Verdict(TRANSLATED, "", (STATES[flag], "coat-e4m3"))
        return None

    return judge


JUDGES: Mapping[str, Callable[[Given, Values], Verdict | None]] = MappingProxyType(
    {
        **dict.fromkeys(FP8_FLAGS, _fp8_format),
        **dict.fromkeys(GATHER, _fp8_param_gather),
        **{flag: _state(flag) for flag in STATES},
        "--bf16": _bf16,
        "--grad-reduce-in-bf16": _grad_reduce_in_bf16,
    }
)
