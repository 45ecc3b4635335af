"""Refusals about the recipe and its variations."""

import pytest

from helpers import refusals
from megatron.lm.config.rules.precision import RULES

# flags beside (and over) those of `refusals.GOOD`, processes, what the message must hold
REFUSALS = {
    "ends without FP8": (
        "--bf16 --first-last-layers-bf16",
        1,
        "--first-last-layers-bf16 applies to FP8 linear layers, and precision bf16 has none: drop it, or use --opt-level O1, O2 or O3",
    ),
    "nothing but ends": (
        "--opt-level O2 --first-last-layers-bf16 --num-layers-at-end-in-bf16 3",
        1,
        "--num-layers-at-start-in-bf16 1 and --num-layers-at-end-in-bf16 3 leave none of the 4 layers in FP8: give fewer, or use --bf16",
    ),
    "no ends": (
        "--opt-level O2 --first-last-layers-bf16 --num-layers-at-end-in-bf16 0 --num-layers-at-start-in-bf16 0",
        1,
        "--num-layers-at-start-in-bf16 0 and --num-layers-at-end-in-bf16 0 leave all layers in FP8: give one of them, or drop",
    ),
    "a count by itself": (
        "--opt-level O2 --num-layers-at-end-in-bf16 2",
        1,
        "--num-layers-at-end-in-bf16 2 has no effect without --first-last-layers-bf16: add it, or drop this",
    ),
    "peer that is not there": ("--precision te-delayed", 1, r"precision te-delayed requires Transformer Engine, which is not installed"),
    "peer with our scaling": (
        "--precision te-delayed --fp8-margin 1",
        1,
        "--fp8-margin 1 contradicts precision te-delayed, which scales as Transformer Engine does: drop it",
    ),
    "peer with our states": (
        "--precision te-bf16 --master-format fp16",
        1,
        "--master-format fp16 contradicts precision te-bf16",
    ),
    "peer with COAT's states": (
        "--precision te-bf16 --optimizer-state coat",
        1,
        "--optimizer-state coat is a format of COAT, and precision",
    ),
    "peer with one state of COAT": ("--precision te-bf16 --exp-avg-format coat-e4m3", 1, "--exp-avg-format coat-e4m3 is a format of COAT"),
    "peer with COAT's activations": (
        "--precision te-block --save-activations coat",
        1,
        "--save-activations coat applies to our norms",
    ),
    "peer with our attention": (
        "--precision te-block --attention-backend cudnn",
        1,
        "--attention-backend cudnn applies to our attention core",
    ),
    "peer in a graph": ("--precision te-block --cuda-graph step", 1, "--cuda-graph step captures our layers but not Transformer Engine's"),
    "peer, deterministic": ("--precision te-block --deterministic", 1, "--deterministic does not apply to Transformer Engine's kernels"),
    "peer with some layers": (
        "--precision te-block --bf16-linears linear_qkv",
        1,
        "--bf16-linears linear_qkv applies to FP8 linear layers",
    ),
    "peer that resumes histories": (
        "--precision te-delayed --load folder --save folder",
        1,
        "--load folder: checkpoints do not contain the amax histories of Transformer Engine .*: add --finetune",
    ),
    "peer with our exchange": (
        "--precision te-delayed --grad-exchange nccl",
        1,
        "--grad-exchange nccl sums FP8 gradients",
    ),
    "peer with our wire": (
        "--precision te-delayed --tensor-model-parallel-size 2 --tp-wire fp8",
        2,
        "--tp-wire fp8 has no effect without --opt-level O3",
    ),
    "operands without FP8": (
        "--precision fp32 --fp8-recipe tensorwise",
        1,
        "--fp8-recipe tensorwise contradicts precision fp32, which has no FP8: drop it, or use --opt-level O1, O2 or O3",
    ),
    "logits without FP8": (
        "--output-layer-precision fp8",
        1,
        "--output-layer-precision fp8 contradicts precision bf16, which has no FP8: drop it, or use --opt-level O1, O2 or O3",
    ),
    "head without FP8": (
        "--output-layer-precision fp8-all",
        1,
        "--output-layer-precision fp8-all contradicts precision bf16, which has no FP8: drop it, or use --opt-level O1, O2 or O3",
    ),
    "fast sums without FP8": (
        "--fp8-fast-accumulation all",
        1,
        "--fp8-fast-accumulation all contradicts precision bf16, which does not use our FP8 layers: drop it, or use --opt-level O1",
    ),
    "fast sums of blocks": (
        "--opt-level O2 --fp8-recipe blockwise --fp8-fast-accumulation all",
        1,
        (
            "--fp8-fast-accumulation all applies to per-tensor scales, and blocks are always accumulated in full precision: "
            "drop it, or use --fp8-recipe delayed"
        ),
    ),
    "attention without FP8": (
        "--attention-precision fp8 --kv-channels 16",
        1,
        "--attention-precision fp8 contradicts precision bf16, which has no FP8: drop it, or use --opt-level O1, O2 or O3",
    ),
    "FP8 attention, other kernel": (
        "--opt-level O2 --attention-precision fp8 --kv-channels 16 --attention-backend flash",
        1,
        "--attention-precision fp8 has its own kernel, and --attention-backend flash names another: drop one",
    ),
    "FP8 attention, dropout": (
        "--opt-level O2 --attention-precision fp8 --kv-channels 16 --attention-dropout 0.1",
        1,
        r"--attention-precision fp8 does not support --attention-dropout \(0.1\): drop one",
    ),
    "FP8 attention, encoder": (
        "--opt-level O2 --attention-precision fp8 --kv-channels 16 --objective masked-lm",
        1,
        "--attention-precision fp8 does not mask padding, which --objective masked-lm requires: drop one",
    ),
    "FP8 attention, deterministic": (
        "--opt-level O2 --attention-precision fp8 --kv-channels 16 --deterministic",
        1,
        "--attention-precision fp8 contradicts --deterministic, since its backward accumulates in no fixed order: drop one",
    ),
    "FP8 attention, heads": (
        "--opt-level O2 --attention-precision fp8 --kv-channels 24",
        1,
        "--attention-precision fp8 requires heads with a multiple of 16 channels up to 128, and they have 24: give other --kv-channels",
    ),
    "window without FP8": ("--fp8-amax-history-len 4", 1, "--fp8-amax-history-len 4 contradicts precision bf16, which has no FP8: drop"),
    "margin without FP8": ("--fp16 --fp8-margin 0", 1, "--fp8-margin 0 contradicts precision fp16-amp, which has no FP8: drop it"),
    "window, just in time": (
        "--opt-level O2 --fp8-recipe tensorwise --fp8-amax-history-len 16",
        1,
        "--fp8-amax-history-len 16 applies to delayed scaling, and --fp8-recipe tensorwise scales just in time: drop it, or use",
    ),
    "algorithm, coat": (
        "--precision coat --fp8-amax-compute-algo max",
        1,
        "--fp8-amax-compute-algo max applies to delayed scaling, and precision coat scales just in time: drop it, or use --fp8-rec",
    ),
    "margin, just in time": (
        "--opt-level O3 --fp8-recipe tensorwise --fp8-margin 1",
        1,
        "--fp8-margin 1 applies to delayed scaling, and --fp8-recipe tensorwise scales just in time",
    ),
    "BF16 in BF16": (
        "--bf16-linears linear_qkv linear_fc1",
        1,
        "--bf16-linears linear_qkv linear_fc1 applies to .* precision bf16 has none: drop",
    ),
    "table of nothing": ("--opt-level O2 --fp8-min-gain 0 --fp8-gain-cache g", 1, "--fp8-gain-cache g has no effect with --fp8-min-gain 0"),
    "table beside a choice": (
        "--opt-level O2 --bf16-linears --fp8-gain-cache g",
        1,
        "--fp8-gain-cache g has no effect with --bf16-linears",
    ),
    "two recipes": ("--precision fp32 --opt-level O2", 1, "--precision fp32 and --opt-level O2 contradict each other: keep one of them"),
    "bf16 and O1": ("--bf16 --opt-level O1", 1, "--opt-level O1 and --bf16 contradict each other: keep one of them"),
    "fp16 and bf16": ("--bf16 --fp16", 1, "--bf16 and --fp16 contradict each other: keep one of them"),
    "loss scale of BF16": (
        "--loss-scale 8",
        1,
        "--loss-scale 8 applies to FP16, and precision bf16 has no loss scale: drop it, or use --fp16",
    ),
    "window of O2": (
        "--opt-level O2 --loss-scale-window 9",
        1,
        "--loss-scale-window 9 applies to FP16, and precision O2 has no loss scale",
    ),
    "constant and moving": (
        "--fp16 --loss-scale 8 --hysteresis 3",
        1,
        "--hysteresis 3 applies to a dynamic loss scale, and --loss-scale 8 is constant: drop one",
    ),
    "least above the first": (
        "--fp16 --min-loss-scale 2048 --initial-loss-scale 1024",
        1,
        "--min-loss-scale 2048 is larger than --initial-loss-scale 1024: lower it",
    ),
    "FP8 in FP16": ("--fp16 --grad-format fp8-e4m3", 1, "--grad-format fp8-e4m3 contradicts precision fp16-amp, which fixes its formats"),
    "coat and another": (
        "--opt-level O2 --optimizer-state coat --exp-avg-format fp16",
        1,
        "--optimizer-state coat contradicts --exp-avg-format fp16: drop one, or choose coat-e4m3 or coat-e5m2",
    ),
    "coat and collage": (
        "--precision collage-fp8 --optimizer-state coat",
        1,
        "--optimizer-state coat contradicts precision collage-fp8: update .* computes in BF16.*; drop it, or use --precision bf16",
    ),
    "format": ("--grad-format fp8-e4m3", 1, "--grad-format fp8-e4m3 contradicts precision bf16, which fixes its formats: drop it, or use"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_value_and_remedy(name):
    refusals.assert_refused(*REFUSALS[name])


def test_every_rule_is_proved_by_a_refusal():
    assert refusals.fired(RULES, REFUSALS.values()) == set(RULES)
