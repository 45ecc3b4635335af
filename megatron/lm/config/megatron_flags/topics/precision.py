"""Flags of precision: FP16, FP8 and the formats of the optimizer's states."""

from megatron.lm.config.megatron_flags.topics.row import accepted, dropped, refused, translated

NO_FP8 = "the state is FP32 without FP8 GEMMs: add --fp8-format hybrid, or give --opt-level O1, O2 or O3 with"
ALL_FP32 = "--master-format fp32 --grad-format fp32 --exp-avg-format fp32 --exp-avg-sq-format fp32"

FLAGS = (
    *accepted(
        "--bf16",
        "--fp16",
        "--loss-scale X",
        "--initial-loss-scale X",
        "--min-loss-scale X",
        "--loss-scale-window N",
        "--hysteresis N",
        "--fp8-recipe TEXT",
        "--fp8-margin N",
        "--fp8-amax-history-len N",
        "--fp8-amax-compute-algo TEXT",
        "--first-last-layers-bf16",
        "--num-layers-at-start-in-bf16 N",
        "--num-layers-at-end-in-bf16 N",
    ),
    *dropped(
        "gradients accumulate and are reduced in FP32, or at O1 to O3 as --grad-accum-dtype specifies",
        "--accumulate-allreduce-grads-in-fp32",
    ),
    *dropped("delayed scaling recomputes its scales every step, in Megatron-LM too", "--fp8-interval N"),
    *dropped("gradients of FP8 weights accumulate in BF16 and are sent in FP8; all others are reduced in FP32", "--grad-reduce-in-bf16"),
    *dropped(
        "states are FP32 unless the recipe has other formats",
        "--main-grads-dtype fp32",
        "--main-params-dtype fp32",
        "--exp-avg-dtype fp32",
        "--exp-avg-sq-dtype fp32",
    ),
    *dropped("it only affects Transformer Engine's kernels", "--reuse-grad-buf-for-mxfp8-param-ag"),
    *translated(f"--opt-level O1 {ALL_FP32}", "--fp8-format hybrid", "--fp8-format e4m3", "--fp8-hybrid"),
    *refused("give hybrid or e4m3", "--fp8-format TEXT"),
    *dropped("with it, --fp8-format selects O3, whose weights are FP8; without FP8 it has no effect", "--fp8-param-gather", "--fp8-param"),
    *refused("all three GEMMs of an FP8 layer are FP8: keep a layer in BF16 with --bf16-linears", "--no-fp8-wgrad", "--disable-fp8-wgrad"),
    *dropped("each state has the format that its own flag gives", "--use-precision-aware-optimizer"),
    *translated("--exp-avg-format coat-e4m3", "--exp-avg-dtype fp8"),
    *translated("--exp-avg-sq-format coat-e4m3", "--exp-avg-sq-dtype fp8"),
    *refused(f"{NO_FP8} --grad-format", "--main-grads-dtype TEXT"),
    *refused(f"{NO_FP8} --master-format", "--main-params-dtype TEXT"),
    *refused(f"{NO_FP8} --exp-avg-format", "--exp-avg-dtype TEXT"),
    *refused(f"{NO_FP8} --exp-avg-sq-format", "--exp-avg-sq-dtype TEXT"),
    *refused("FP4 is not supported: use FP8, --opt-level O1 to O3", "--fp4-*"),
    *refused(
        "recipes are data here: register one, as CONTRIBUTING.md describes",
        "--fp8-quantizer-factory TEXT",
        "--te-precision-config-file FILE",
        "--use-kitchen-attention",
        "--kitchen-*",
    ),
    *refused("the loss is computed in FP32: drop it", "--fp16-lm-cross-entropy"),
)
