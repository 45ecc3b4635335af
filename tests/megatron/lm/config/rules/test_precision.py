"""Refusals about the recipe and its variations."""

from helpers import refusals
from megatron.lm.config.rules.precision import RULES

# flags beside (and over) those of `refusals.GOOD`, what the message must hold, processes (1)
REFUSALS: list[refusals.Refusal] = [
    (
        "--bf16 --fp8-guard",
        "--fp8-guard raises our FP8 linear layers, and precision bf16 has none: drop it, or use --opt-level O1, O2 or O3",
    ),
    (
        "--opt-level O2 --fp8-guard-underflow 0.25",
        "--fp8-guard-underflow 0.25 has no effect without --fp8-guard: add it, or drop this",
    ),
    (
        "--opt-level O2 --fp8-guard --num-experts 4",
        r"--fp8-guard is not built for experts \(--num-experts 4\), whose GEMMs it cannot raise: drop one",
    ),
    (
        "--opt-level O2 --fp8-guard --bf16-linears linear_qkv linear_proj linear_fc1 linear_fc2",
        "--fp8-guard raises FP8 linear layers, and --bf16-linears keeps all of them in BF16: drop one",
    ),
    (
        "--opt-level O2 --swiglu --smooth-swiglu --num-experts 4",
        r"--smooth-swiglu is not built for experts \(--num-experts 4\), whose channels have no scales: drop one",
    ),
    (
        "--opt-level O2 --smooth-swiglu",
        "--smooth-swiglu scales the output of SwiGLU, and the activation is gelu: add --swiglu, or drop it",
    ),
    (
        "--bf16 --swiglu --smooth-swiglu",
        "--smooth-swiglu applies to our FP8 linear layers, and precision bf16 has none: drop it, or use --opt-level O1, O2 or O3",
    ),
    (
        "--opt-level O2 --swiglu --smooth-swiglu --bf16-linears linear_fc2",
        "--smooth-swiglu scales the input of linear_fc2, which --bf16-linears keeps in BF16: drop one",
    ),
    (
        "--opt-level O2 --swiglu --smooth-swiglu --fp8-recipe blockwise",
        "--smooth-swiglu requires delayed scales, and --fp8-recipe blockwise casts the input as ",
    ),
    (
        "--precision coat --swiglu --smooth-swiglu",
        "--smooth-swiglu requires delayed scales, and precision coat casts the input as ",
    ),
    (
        "--bf16 --first-last-layers-bf16",
        "--first-last-layers-bf16 applies to FP8 linear layers, and precision bf16 has none: drop it, or use --opt-level O1, O2 or O3",
    ),
    (
        "--opt-level O2 --first-last-layers-bf16 --num-layers-at-end-in-bf16 3",
        "--num-layers-at-start-in-bf16 1 and --num-layers-at-end-in-bf16 3 leave none of the 4 layers in FP8: give fewer, or use --bf16",
    ),
    (
        "--opt-level O2 --first-last-layers-bf16 --num-layers-at-end-in-bf16 0 --num-layers-at-start-in-bf16 0",
        "--num-layers-at-start-in-bf16 0 and --num-layers-at-end-in-bf16 0 leave all layers in FP8: give one of them, or drop",
    ),
    (
        "--opt-level O2 --num-layers-at-end-in-bf16 2",
        "--num-layers-at-end-in-bf16 2 has no effect without --first-last-layers-bf16: add it, or drop this",
    ),
    ("--precision te-delayed", r"precision te-delayed requires Transformer Engine, which is not installed"),
    (
        "--precision te-delayed --fp8-margin 1",
        "--fp8-margin 1 contradicts precision te-delayed, which scales as Transformer Engine does: drop it",
    ),
    ("--precision te-bf16 --qk-layernorm", "--qk-layernorm adds our norms of queries and keys, which Transformer Engine's layers do not"),
    ("--precision te-bf16 --master-format fp16", "--master-format fp16 contradicts precision te-bf16"),
    ("--precision te-bf16 --optimizer-state coat", "--optimizer-state coat is a format of COAT, and precision"),
    ("--precision te-bf16 --exp-avg-format coat-e4m3", "--exp-avg-format coat-e4m3 is a format of COAT"),
    ("--precision te-block --save-activations coat", "--save-activations coat applies to our norms"),
    ("--precision te-block --attention-backend cudnn", "--attention-backend cudnn applies to our attention core"),
    ("--precision te-block --cuda-graph step", "--cuda-graph step captures our layers but not Transformer Engine's"),
    ("--precision te-block --deterministic", "--deterministic does not apply to Transformer Engine's kernels"),
    ("--precision te-block --bf16-linears linear_qkv", "--bf16-linears linear_qkv applies to FP8 linear layers"),
    (
        "--precision te-delayed --load folder --save folder",
        "--load folder: checkpoints do not contain the amax histories of Transformer Engine .*: add --finetune",
    ),
    ("--precision te-delayed --grad-exchange nccl", "--grad-exchange nccl sums FP8 gradients"),
    ("--precision te-delayed --tensor-model-parallel-size 2 --tp-wire fp8", "--tp-wire fp8 has no effect without --opt-level O3", 2),
    (
        "--precision fp32 --fp8-recipe tensorwise",
        "--fp8-recipe tensorwise contradicts precision fp32, which has no FP8: drop it, or use --opt-level O1, O2 or O3",
    ),
    (
        "--output-layer-precision fp8",
        "--output-layer-precision fp8 contradicts precision bf16, which has no FP8: drop it, or use --opt-level O1, O2 or O3",
    ),
    (
        "--output-layer-precision fp8-all",
        "--output-layer-precision fp8-all contradicts precision bf16, which has no FP8: drop it, or use --opt-level O1, O2 or O3",
    ),
    (
        "--fp8-fast-accumulation all",
        "--fp8-fast-accumulation all contradicts precision bf16, which does not use our FP8 layers: drop it, or use --opt-level O1",
    ),
    ("--fp8-fast-accumulation none", "--fp8-fast-accumulation none contradicts"),
    (
        "--opt-level O2 --fp8-recipe blockwise --fp8-fast-accumulation all",
        (
            "--fp8-fast-accumulation all applies to per-tensor scales, and blocks are always accumulated in full precision: "
            "drop it, or use --fp8-recipe delayed"
        ),
    ),
    (
        "--attention-precision fp8 --kv-channels 16",
        "--attention-precision fp8 contradicts precision bf16, which has no FP8: drop it, or use --opt-level O1, O2 or O3",
    ),
    (
        "--opt-level O2 --attention-precision fp8 --kv-channels 16 --attention-backend flash",
        "--attention-precision fp8 has its own kernel, and --attention-backend flash names another: drop one",
    ),
    (
        "--opt-level O2 --attention-precision fp8 --kv-channels 16 --attention-dropout 0.1",
        r"--attention-precision fp8 does not support --attention-dropout \(0.1\): drop one",
    ),
    (
        "--opt-level O2 --attention-precision fp8 --kv-channels 16 --objective masked-lm",
        "--attention-precision fp8 does not mask padding, which --objective masked-lm requires: drop one",
    ),
    (
        "--opt-level O2 --attention-precision fp8 --kv-channels 16 --deterministic",
        "--attention-precision fp8 contradicts --deterministic, since its backward accumulates in no fixed order: drop one",
    ),
    (
        "--opt-level O2 --attention-precision fp8 --kv-channels 24",
        "--attention-precision fp8 requires heads with a multiple of 16 channels up to 128, and they have 24: give other --kv-channels",
    ),
    ("--fp8-amax-history-len 4", "--fp8-amax-history-len 4 contradicts precision bf16, which has no FP8: drop"),
    ("--fp16 --fp8-margin 0", "--fp8-margin 0 contradicts precision fp16-amp, which has no FP8: drop it"),
    (
        "--opt-level O2 --fp8-recipe tensorwise --fp8-amax-history-len 16",
        "--fp8-amax-history-len 16 applies to delayed scaling, and --fp8-recipe tensorwise scales just in time: drop it, or use",
    ),
    (
        "--precision coat --fp8-amax-compute-algo max",
        "--fp8-amax-compute-algo max applies to delayed scaling, and precision coat scales just in time: drop it, or use --fp8-rec",
    ),
    (
        "--opt-level O3 --fp8-recipe tensorwise --fp8-margin 1",
        "--fp8-margin 1 applies to delayed scaling, and --fp8-recipe tensorwise scales just in time",
    ),
    ("--bf16-linears linear_qkv linear_fc1", "--bf16-linears linear_qkv linear_fc1 applies to .* precision bf16 has none: drop"),
    ("--opt-level O2 --fp8-min-gain 0 --fp8-gain-cache g", "--fp8-gain-cache g has no effect with --fp8-min-gain 0"),
    ("--opt-level O2 --bf16-linears --fp8-gain-cache g", "--fp8-gain-cache g has no effect with --bf16-linears"),
    ("--precision fp32 --opt-level O2", "--precision fp32 and --opt-level O2 contradict each other: keep one of them"),
    ("--bf16 --opt-level O1", "--opt-level O1 and --bf16 contradict each other: keep one of them"),
    ("--bf16 --fp16", "--bf16 and --fp16 contradict each other: keep one of them"),
    ("--loss-scale 8", "--loss-scale 8 applies to FP16, and precision bf16 has no loss scale: drop it, or use --fp16"),
    ("--opt-level O2 --loss-scale-window 9", "--loss-scale-window 9 applies to FP16, and precision O2 has no loss scale"),
    ("--fp16 --loss-scale 8 --hysteresis 3", "--hysteresis 3 applies to a dynamic loss scale, and --loss-scale 8 is constant: drop one"),
    ("--fp16 --min-loss-scale 2048 --initial-loss-scale 1024", "--min-loss-scale 2048 is larger than --initial-loss-scale 1024: lower it"),
    ("--fp16 --grad-format fp8-e4m3", "--grad-format fp8-e4m3 contradicts precision fp16-amp, which fixes its formats"),
    (
        "--opt-level O2 --optimizer-state coat --exp-avg-format fp16",
        "--optimizer-state coat contradicts --exp-avg-format fp16: drop one, or choose coat-e4m3 or coat-e5m2",
    ),
    (
        "--precision collage-fp8 --optimizer-state coat",
        "--optimizer-state coat contradicts precision collage-fp8: update .* computes in BF16.*; drop it, or use --precision bf16",
    ),
    ("--grad-format fp8-e4m3", "--grad-format fp8-e4m3 contradicts precision bf16, which fixes its formats: drop it, or use"),
]


test_refusal_names_value_and_fix, test_every_rule_is_proved_by_a_refusal = refusals.proof(RULES, REFUSALS)
